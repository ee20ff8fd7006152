"""What Python does beside the tensors of a forward, and a captured step does not: it is found out, and told."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from autopar.capture.caches import classes_of, files_of
from autopar.held import within
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


@contextlib.contextmanager
def classes_checked(model: torch.nn.Module) -> Iterator[None]:
    """``one_hot`` looks at its operand's values, but not at those of a fake tensor; so a step that is captured is given an op
    that does, in ``torch.nn.functional`` and where the model's own files have imported it."""
    kept = F.one_hot

    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        return kept(within(tensor, num_classes) if num_classes > 0 else tensor, num_classes)

    files = [names for names in (vars(F), *files_of(classes_of(model))) if names.get("one_hot") is kept]
    for names in files:
        names["one_hot"] = one_hot
    try:
        yield
    finally:
        for names in files:
            names["one_hot"] = kept


def _generators() -> dict[str, Any]:
    """The states of Python's own generator, and of NumPy's where it has been imported."""
    found: dict[str, Any] = {"random": random.getstate(), "numpy.random": None}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy.random"] = (name, keys.tobytes(), *rest)
    return found
