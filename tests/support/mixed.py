"""A model's step under mixed precision, on simulated ranks: captured in float32, its parameters handed in as the
program takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shared_captures import captured
from torch import nn

from autopar import Mesh
from autopar.capture import capture
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.passes import pipeline, run_passes
from autopar.passes.amp import Amp
from autopar.plan.constraints import constraints
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.simulated_step import SimulatedStep
from autopar.verify.levels import verify


@dataclass
class Step:
    """What a step returned, and the gradients of its parameters, by name."""

    program: Program
    returned: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def traced(model: nn.Module, args: Sequence[Any], amp: str | None, **options: Any) -> Program:
    """A capture of the model after the pass ``amp``; what it says is verified, printed and parsed back."""
    program = captured(lambda: capture(model, args), model, args).program
    run_passes(program, [Amp(amp, **options)])
    return program


def run(
    model: nn.Module,
    mesh: Mesh,
    plan: Any,
    args: Sequence[torch.Tensor],
    amp: str | None,
    passes: Sequence[Any] = (),
    **options: Any,
) -> Step:
    """Forward and backward of the first tensor returned, summed if it is not a scalar. ``passes`` go in front of
    ``reshard``."""
    call = captured(lambda: capture(model, args), model, args)
    program = call.program
    attrs, _ = constraints(plan, model, mesh, call, {})
    run_passes(program, [Amp(amp, **options)])
    steps = pipeline(mesh, attrs)
    at = [step.name for step in steps].index("reshard")
    run_passes(program, [*steps[:at], *passes, *steps[at:]])
    local = LocalPrograms(program, lambda made: verify(made, "localize"))
    for rank in mesh.ranks:
        local[rank]
    step = SimulatedStep(program, local, lambda given: None)
    tensors = [*model.parameters(), *model.buffers(), *args]
    given = [node for node in program.placeholders if record_of(node).role != "tangent"]
    with torch.no_grad():
        returned, runs = step.forward([_like(tensor, node) for tensor, node in zip(tensors, given, strict=True)])
        tangents = {name: torch.ones_like(returned[k]) for k, name in step.interface.tangents.items()}
        found = step.backward(runs, tangents)
    names = {record_of(node).name or node.name: node.name for node in given}
    return Step(program, returned, {name: found[names[name]] for name, _ in model.named_parameters()})


def _like(tensor: torch.Tensor, node: Any) -> torch.Tensor:
    dtype = record_of(node).type.dtype
    return tensor.detach().clone() if tensor.dtype == dtype else tensor.detach().to(dtype)


def eager(
    model: nn.Module, args: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[list[torch.Tensor], Mapping[str, torch.Tensor]]:
    """What the model returns on a single device, and the gradients; with a dtype, under ``torch.autocast``."""
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        found = model(*args)
    returned = list(found) if isinstance(found, (tuple, list)) else [found]
    differentiable = [tensor for tensor in returned if tensor.requires_grad]
    torch.autograd.backward(differentiable, [torch.ones_like(tensor) for tensor in differentiable])
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    return [tensor.detach() for tensor in returned], gradients
