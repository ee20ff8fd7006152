"""Loops over experts on each rank of a world, beside eager."""

from __future__ import annotations

import copy

import expert_loops
import torch
from expert_loops import batch
from loops import whole

import autopar
from autopar import Mesh


def same_numbers(kind: str, sizes: dict[str, int]) -> int:
    """Outputs and gradients of batches that choose differently; returns the number of captures."""
    torch.manual_seed(0)
    model = getattr(expert_loops, kind)().double()
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), "ddp", outputs="global")
    for which in ("any", "alike", "others"):
        for net in (eager, parallel):
            net.zero_grad()
        expected, found = eager(batch(which)), parallel(batch(which))
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        for ours, theirs in zip(parallel.parameters(), eager.parameters(), strict=True):
            gradient = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            torch.testing.assert_close(whole(ours.grad), gradient, rtol=1e-10, atol=1e-10)
    return parallel.captures
