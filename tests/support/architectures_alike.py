"""Compare architectures of the zoo on a mesh with eager, and count the transfers of their layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from casts import promoted_casts  # noqa: F401
from equality import TOLERANCE, loss_of
from zoo import Architecture
from zoo_architectures import ARCHITECTURES

import autopar
from autopar import Mesh
from autopar.ir.structure import flatten

SQUARE = Mesh(dp=2, tp=2)
MESHES = {"tp=4": Mesh(tp=4), "dp=4": Mesh(dp=4), "2x2": SQUARE, "2x2x2": Mesh(dp=2, cp=2, tp=2)}

LOOPS_OVER_HITS = ("switch", "nllb moe")  # the weights of an expert are parameters of its own


def plan_for(architecture: Architecture, mesh: Mesh, given: dict[str, Any]) -> Any:
    split = {name: ("dp", "cp") for name in architecture.sequence if name in given} if "cp" in mesh.names else {}
    return ["megatron" if "tp" in mesh.names else "ddp", split]


def check_equal(name: str, mesh: Mesh, dropout: float = 0.0) -> autopar.Parallel:
    """Compare with eager, with the single device's random numbers. A gradient that is zero but for rounding is as large
    as the rounding of larger ones, so that 1e-3 of the largest of all is the least that a difference is compared
    with."""
    architecture = ARCHITECTURES[name]
    model, given = architecture.make(dropout=dropout), architecture.batch()
    eager = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = eager(**given)
    # the squares of scores that are masked with the smallest number are infinite
    loss = loss_of if loss_of(expected).isfinite() else lambda outputs: outputs["loss"]
    loss(expected).backward()
    parallel = autopar.parallelize(
        model, mesh, plan_for(architecture, mesh, given), example=((), given), random="single"
    )
    torch.manual_seed(1)
    outputs = parallel.simulate(**given)
    loss(outputs).backward()
    assert flatten(outputs)[1] == flatten(expected)[1]
    for ours, theirs in zip(flatten(outputs)[0], flatten(expected)[0], strict=True):
        assert near(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
    scale = max(float(p.grad.abs().max()) for p in eager.parameters() if p.grad is not None)
    for (which, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        if name in LOOPS_OVER_HITS and theirs.grad is None and ours.grad is not None:
            assert not ours.grad.any(), which  # of an expert that no token has chosen
            continue
        assert (ours.grad is None) == (theirs.grad is None), which
        assert theirs.grad is None or near(ours.grad, theirs.grad, 1e-3 * scale), which
    # a mean may be zero but for rounding
    large = max((float(b.abs().max()) for b in eager.buffers() if b.is_floating_point() and b.numel()), default=0.0)
    for (which, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert near(ours, theirs, max(1e-6, 1e-3 * large)), which
    return parallel


def near(ours: torch.Tensor, theirs: torch.Tensor, least: float = 1e-6) -> bool:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    if not theirs.dtype.is_floating_point:
        return torch.equal(ours, theirs)
    ours, theirs = ours.detach(), theirs.detach()
    different = (ours - theirs).abs().where(ours != theirs, 0)  # infinite alike is alike
    return not theirs.numel() or float(different.max() / theirs.abs().max().clamp_min(least)) <= TOLERANCE


def over_tp(name: str, layers: int) -> dict[str, list[int]]:
    """Transfer → how many over tp move anything, forward and backward."""
    architecture = ARCHITECTURES[name]
    parallel = autopar.parallelize(architecture.make(layers), SQUARE, "megatron", example=((), architecture.batch()))
    found: dict[str, list[int]] = {}
    for row in parallel.transfers:
        if "tp" in row.axis.split("×") and row.transfer not in ("slice", "pend"):
            found.setdefault(row.transfer, [0, 0])[row.phase == "backward"] += row.times
    return found
