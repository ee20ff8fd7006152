"""Run a placed model on all simulated ranks, and compare its numbers with those of a single device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.api import split_example
from autopar.capture.exported import is_exported
from autopar.cli.plan.planning import Planned, Planning
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.refused import Refused
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.structure import flatten, unflatten
from autopar.parallel import Parallel

MOST_PARAMETERS, MOST_RANKS = 20_000_000, 64  # of a model that is simulated: each rank has its pieces here
EXACT, ROUNDED = 1e-9, 1e-4  # relative differences: in float64 alone, and where the model computes in narrower dtypes
SMALL = 1e-6  # of all gradients: what is smaller is zero but for rounding


@dataclass(frozen=True)
class Numbers:
    """How far the numbers of all ranks are from those of a single device.

    Attributes:
        what: what was compared: outputs and gradients, or the loss and the parameters after a step.
        largest: the largest relative difference, by norms.
        of: the value that has it.
        count: the number of values.
        tolerance: the largest difference that rounding explains.
    """

    what: str
    largest: float
    of: str
    count: int
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether the numbers are the same, but for rounding; NaN is not."""
        return self.largest <= self.tolerance


def in_float64(planning: Planning) -> Planning:
    """Return the same with a small model in float64, as it is compared: without dropout.

    Raises:
        Refused: the model or the mesh is too large to be simulated here.
    """
    parameters = sum(parameter.numel() for parameter in planning.model.parameters())
    if parameters > MOST_PARAMETERS:
        raise Refused(
            f"--run simulates all ranks in this process, and the model has {parameters:,} parameters, more than "
            f"{MOST_PARAMETERS:,}; make it smaller, as with --set num_hidden_layers=2, or leave --run out"
        )
    ranks = getattr(planning.mesh, "size", getattr(planning.mesh, "count", 0))
    if ranks > MOST_RANKS:
        raise Refused(
            f"--run simulates all ranks in this process, and {ranks} are more than {MOST_RANKS}; use a smaller --mesh, "
            f"or leave --run out"
        )
    if is_exported(planning.model):
        raise Refused(
            "--run compares a model in float64 and in evaluation, and an exported program keeps its dtypes and its "
            "mode; name a function that makes the model, or leave --run out"
        )
    leaves, structure = flatten(planning.example)
    wide = [leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    return replace(planning, model=planning.model.double().eval(), example=unflatten(wide, structure))


def compared(planned: Planned, planning: Planning) -> Numbers:
    """Run the model on all simulated ranks and alone, and return the largest difference of their numbers.

    Parameters of a training step change.
    """
    eager = copy.deepcopy(planning.model)
    args, kwargs = split_example(planning.example)
    if isinstance(planned, Parallel):
        what, program = "outputs and gradients", planned.program
        pairs = _of_call(eager, planned, args, kwargs)
    else:
        what, program = "the loss and the parameters after a step", planned.program.programs["micro"]
        assert planning.optimizer is not None
        optimizer = OPTIMIZERS[planning.optimizer](eager.parameters(), 1e-3, 0.0)
        expected = next(leaf for leaf in flatten(eager(*args, **kwargs))[0] if _is_loss(leaf))
        expected.backward()
        optimizer.step()
        loss = planned.simulate(*args, **kwargs)
        own = dict(planned.parallel.named_parameters())
        pairs = [("the loss", loss, expected), *((name, own[name], p) for name, p in eager.named_parameters())]
    tolerance = EXACT if _is_wide(program) else ROUNDED
    differences = [(_difference(ours, theirs), name) for name, ours, theirs in pairs]
    largest, name = max(differences, default=(0.0, ""), key=lambda row: (row[0] != row[0], row[0]))
    return Numbers(what, largest, name, len(differences), tolerance)


def _of_call(eager: torch.nn.Module, planned: Parallel, args: Any, kwargs: Any) -> list[tuple[str, Any, Any]]:
    """Return the values of a call and their gradients, as name, ours, theirs."""
    theirs, ours = flatten(eager(*args, **kwargs))[0], flatten(planned.simulate(*args, **kwargs))[0]
    tensors = [
        (f"output {k}", a, b) for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if isinstance(b, torch.Tensor)
    ]
    for values in (ours, theirs):
        sums = [value.double().square().sum() for value in values if _has_gradient(value)]
        if sums:
            torch.stack(sums).sum().backward()
    own = dict(planned.named_parameters())
    pairs = [(name, own[name].grad, p.grad) for name, p in eager.named_parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for _, _, gradient in pairs]).norm() if pairs else torch.zeros(())
    floor = float(norm) * SMALL
    return [*tensors, *((f"the gradient of {name}", a, b) for name, a, b in pairs if float(b.norm()) > floor)]


def _difference(ours: Any, theirs: torch.Tensor) -> float:
    if not isinstance(ours, torch.Tensor) or ours.shape != theirs.shape:
        return float("inf")
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)) if not torch.equal(ours, theirs) else 0.0


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_loss(value: Any) -> bool:
    return _has_gradient(value) and value.numel() == 1


def _is_wide(program: Program) -> bool:
    """Return whether all floats of a program are in float64."""
    return all(not dtype.is_floating_point or dtype == torch.float64 for dtype in _dtypes(program))


def _dtypes(program: Program) -> Iterator[torch.dtype]:
    for node in program.nodes:
        types = record_of(node).type
        for type in types if isinstance(types, tuple) else (types,):
            if isinstance(type, TensorType):
                yield type.dtype
