"""An architecture of the zoo on each rank of a world, beside eager: in float32, with dropout, unchanged."""

from __future__ import annotations

import copy

import torch
from equality import loss_of
from loops import whole
from torch.distributed.tensor import DTensor
from zoo_architectures import ARCHITECTURES

import autopar
from autopar import Mesh
from autopar.ir.structure import flatten

TOLERANCE = 2e-4  # of the largest value: float32, over reductions in another order


def same_numbers(name: str, sizes: dict[str, int]) -> None:
    """Outputs, gradients and buffers of two steps; the random numbers are a single device's."""
    architecture, mesh = ARCHITECTURES[name], Mesh(sizes)
    torch.manual_seed(0)
    model = architecture.make(dropout=0.1).float()
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(
        model, mesh, "megatron" if "tp" in sizes else "ddp", random="single", outputs="global"
    )
    for seed in (1, 2):
        torch.manual_seed(seed)
        given = {
            key: value.float() if value.is_floating_point() else value for key, value in architecture.batch().items()
        }
        for net in (eager, parallel):
            net.zero_grad()
        torch.manual_seed(seed)
        expected = eager(**given)
        loss_of(expected).backward()
        torch.manual_seed(seed)
        found = parallel(**given)
        loss_of(found).backward()
        for ours, theirs in zip(flatten(found)[0], flatten(expected)[0], strict=True):
            assert near(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
        scale = max(float(p.grad.abs().max()) for p in eager.parameters() if p.grad is not None)
        for (which, ours), theirs in zip(parallel.named_parameters(), eager.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), which
            assert theirs.grad is None or near(whole(ours.grad), theirs.grad, 1e-2 * scale), which
        for (which, ours), theirs in zip(parallel.named_buffers(), eager.named_buffers(), strict=True):
            assert near(whole(ours) if isinstance(ours, DTensor) else ours, theirs[1]), which


def near(ours: torch.Tensor, theirs: torch.Tensor, least: float = 1e-6) -> bool:
    if not theirs.is_floating_point() or not theirs.numel():
        return torch.equal(ours, theirs)
    difference = (ours.detach() - theirs.detach()).abs().where(ours != theirs, 0)
    return bool(difference.max() <= TOLERANCE * theirs.abs().max().clamp_min(least))
