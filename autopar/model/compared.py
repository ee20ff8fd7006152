"""Compare the numbers of a model on simulated ranks with those of a single device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.structure import flatten

EXACT, ROUNDED = 1e-9, 1e-4  # relative differences: in float64 alone, and where the model computes in narrower dtypes
SMALL = 1e-6  # of all gradients: what is smaller is zero but for rounding

Pair = tuple[str, Any, torch.Tensor]  # a name, our value, and that of a single device


@dataclass(frozen=True)
class Numbers:
    """How far the numbers of all ranks are from those of a single device.

    Attributes:
        what: what was compared: outputs and gradients, or the loss and the parameters after a step.
        largest: the largest relative difference, by norms.
        of: the value that has it.
        count: the number of values.
        tolerance: the largest difference that rounding explains.
        first: the first number that differs, in words; empty if all are equal.
    """

    what: str
    largest: float
    of: str
    count: int
    tolerance: float
    first: str = ""

    @property
    def equal(self) -> bool:
        """Whether the numbers are the same, but for rounding; NaN is not."""
        return self.largest <= self.tolerance

    @staticmethod
    def of_pairs(what: str, pairs: Iterable[Pair], tolerance: float) -> Numbers:
        """Compare values, in the order in which errors name the first one."""
        rows = [(difference(ours, theirs), name, ours, theirs) for name, ours, theirs in pairs]
        largest, of = max(((far, name) for far, name, *_ in rows), default=(0.0, ""), key=_nan_last)
        wrong = ((name, ours, theirs) for far, name, ours, theirs in rows if not far <= tolerance)
        first = next((name + _where(ours, theirs) for name, ours, theirs in wrong), "")
        return Numbers(what, largest, of, len(rows), tolerance, first)


def _nan_last(row: tuple[float, str]) -> tuple[bool, float]:
    return row[0] != row[0], row[0]


def _where(ours: Any, theirs: torch.Tensor) -> str:
    """Say at which index two values differ, and what they are there."""
    if not isinstance(ours, torch.Tensor):
        return f" is {ours!r}, and a tensor on a single device"
    if ours.shape != theirs.shape:
        return f" has the shape {list(ours.shape)}, and {list(theirs.shape)} on a single device"
    apart = (ours.detach().double() - theirs.detach().double()).abs().nan_to_num(float("inf"))
    limit = ROUNDED * float(theirs.detach().double().abs().max()) if theirs.numel() else 0.0
    first = int((apart.flatten() > min(limit, float(apart.max()) / 2)).int().argmax()) if apart.numel() else 0
    at = [int(k) for k in torch.unravel_index(torch.tensor(first), ours.shape)]
    return f"{at} is {ours.flatten()[first].item():g}, and {theirs.flatten()[first].item():g} on a single device"


def pairs_of_call(eager: torch.nn.Module, simulated: Any, args: Any, kwargs: Any) -> list[Pair]:
    """Call a model on a single device and on all simulated ranks; returns the outputs and the gradients.

    Args:
        simulated: the same model on a mesh, in a process that is alone.
    """
    theirs, ours = flatten(eager(*args, **kwargs))[0], flatten(simulated.simulate(*args, **kwargs))[0]
    tensors = [
        (f"output {k}", a, b) for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if isinstance(b, torch.Tensor)
    ]
    for values in (ours, theirs):
        sums = [value.double().square().sum() for value in values if has_gradient(value)]
        if sums:
            torch.stack(sums).sum().backward()
    own = dict(simulated.named_parameters())
    pairs = [(name, own[name].grad, p.grad) for name, p in eager.named_parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for _, _, gradient in pairs]).norm() if pairs else torch.zeros(())
    floor = float(norm) * SMALL
    return [*tensors, *((f"the gradient of {name}", a, b) for name, a, b in pairs if float(b.norm()) > floor)]


def difference(ours: Any, theirs: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of a single device's value; infinite for other shapes."""
    if not isinstance(ours, torch.Tensor) or ours.shape != theirs.shape:
        return float("inf")
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)) if not torch.equal(ours, theirs) else 0.0


def has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def tolerance_of(program: Program) -> float:
    """Return the largest difference that rounding explains: less if all floats of the program are in float64."""
    is_wide = all(not dtype.is_floating_point or dtype == torch.float64 for dtype in _dtypes(program))
    return EXACT if is_wide else ROUNDED


def _dtypes(program: Program) -> Iterator[torch.dtype]:
    for node in program.nodes:
        types = record_of(node).type
        for type in types if isinstance(types, tuple) else (types,):
            if isinstance(type, TensorType):
                yield type.dtype
