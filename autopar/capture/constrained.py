"""Let a model's forward say how a value lies: ``x = autopar.constrain(x, ("dp", None))``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from autopar.errors import class_of, shown


class Constrained(NamedTuple):
    """A value that forward constrains.

    Attributes:
        value: its name in the program.
        spec: as in a plan: an axis, several, ``None`` or ``"?"`` for each dim.
        source: the user's line.
        axis: the layout is a default for a mesh that has this axis, and yields to what the plan says; "" if forward
            says it.
    """

    value: str
    spec: Any
    source: str
    axis: str = ""


class Notes(Protocol):
    """What takes notes of a capture."""

    def constrain(self, x: torch.Tensor, spec: Any) -> None: ...
    def come_from(self, module: str, line: str) -> None: ...
    def returns(self, module: str, value: torch.Tensor) -> None: ...


_CAPTURES: list[Notes] = []  # the running capture; there is one at most


def constrain(x: torch.Tensor, spec: Sequence[Any]) -> torch.Tensor:
    """Return ``x`` itself. Where autopar captures the step, all who read the value read it in this layout.

    Its gradient is free. Outside of a capture nothing happens, so the model also runs without autopar.

    Args:
        x: a value that forward computes, or an input.
        spec: as in a plan: for each dim an axis of the mesh, a tuple of axes, ``None`` (whole) or ``"?"`` (open). Dims
            at the end may be left out; they are whole.

    Raises:
        TypeError: ``x`` is no tensor, or ``spec`` has no entries.
        PlanError: later, by ``parallelize``: the mesh has no such axis, or the plan contradicts it.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"constrain takes a tensor, not {class_of(x)}")
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        raise TypeError(
            f"constrain takes an axis, None or '?' for each dim, as in autopar.constrain(x, (\"dp\", None)), not "
            f"{shown(spec)}"
        )
    for notes in _CAPTURES[-1:]:
        notes.constrain(x, spec)
    return x


def running_capture() -> Notes | None:
    """Return what takes notes of the capture that is running; ``None`` outside of a capture."""
    return _CAPTURES[-1] if _CAPTURES else None


@contextlib.contextmanager
def noted(notes: Notes) -> Iterator[None]:
    """Note what forward constrains meanwhile."""
    _CAPTURES.append(notes)
    try:
        yield
    finally:
        _CAPTURES.remove(notes)
