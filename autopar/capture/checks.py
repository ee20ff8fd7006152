"""What Python does beside the tensors of a forward, and a captured step does not: it is found out, and told."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from autopar.provenance import user_line
from autopar.torch_private import value_checks_replaced


class Beside:
    """Watches a forward.

    Attributes:
        unchecked: lines that check the values of tensors and do nothing else.
        drawn: generators of numbers, not of tensors, that forward draws from.
    """

    def __init__(self) -> None:
        self.unchecked: list[str] = []
        self.drawn: list[str] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        before = _generators()
        with value_checks_replaced(lambda: self.unchecked.append(user_line())):
            yield
        self.drawn = [name for name, state in _generators().items() if state != before[name]]

    def notes(self) -> list[str]:
        checks = [f"the captured step does not check values, as it is done here\n    {line}" for line in dict.fromkeys(self.unchecked)]
        return checks + [f"forward draws numbers from {name}; the captured step keeps those of the first call" for name in self.drawn]


def _generators() -> dict[str, Any]:
    """The states of Python's own generator, and of NumPy's where it has been imported."""
    found: dict[str, Any] = {"random": random.getstate(), "numpy.random": None}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy.random"] = (name, keys.tobytes(), *rest)
    return found
