"""Calls on stages with gradients, beside the model on a single device: simulated, or on this rank."""

from __future__ import annotations

import copy
from typing import Any

import loops
import pytest
import torch
from equality import relative
from pipelined_outputs import MODELS
from pipelined_steps import MESHES, SPLIT, is_here, vectors
from torch import distributed, nn

import autopar
from autopar import Mesh


class Counted(MODELS["shared"]):  # type: ignore[name-defined,misc]
    """The batch norm writes buffers, and dropout draws."""

    def layer(self, dim: int) -> nn.Module:
        return nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.Tanh())


def made(name: str, mesh: str, policy: str = "1f1b", layers: int = 4, **options: Any) -> tuple[Any, nn.Module]:
    """A model whose parameters are on stages, and the same on a single device."""
    torch.manual_seed(0)
    model = ({"counted": Counted} | MODELS)[name](layers).double()
    alone, sizes = copy.deepcopy(model), MESHES[mesh]
    plan: Any = SPLIT if "tp" in sizes else "ddp" if "dp" in sizes else {}
    parallel = autopar.parallelize(model, Mesh(sizes), plan, **options)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=1, schedule=policy)
    step.capture(**batch_of(parallel, 0))
    return parallel, alone


def batch_of(parallel: Any, k: int) -> dict[str, torch.Tensor]:
    """The rows that this process passes; ``x`` requires a gradient."""
    batch = vectors(8)(k)
    if parallel._calls.binding.passed == "local":
        dp = parallel.mesh.coordinates(distributed.get_rank())["dp"]
        batch = {name: rows.chunk(2)[dp].contiguous() for name, rows in batch.items()}
    return {**batch, "x": batch["x"].requires_grad_()}


def summed(found: Any, outputs: tuple[str, ...]) -> torch.Tensor:
    """A number of some outputs, whose gradients differ."""
    return torch.stack([loops.whole(found[name]).mul(k + 1.5).sin().sum() for k, name in enumerate(outputs)]).sum()


def alike(parallel: Any, alone: nn.Module, k: int, outputs: tuple[str, ...], times: int = 1) -> None:
    """Outputs, buffers and gradients of parameters and inputs equal those of a single device; none is where it has
    none."""
    call = parallel.simulate if parallel.job is None else parallel
    ours, theirs = batch_of(parallel, k), vectors(8)(k)
    theirs["x"].requires_grad_()
    parallel.zero_grad(), alone.zero_grad()
    for found in ((call, ours), (alone, theirs)):
        number = summed(found[0](**found[1]), outputs)
        for time in range(times):
            number.backward(retain_graph=time + 1 < times)
    for (name, a), (_, b) in zip(parallel.named_parameters(), alone.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None and is_here(a):
            # some are zero but for rounding, as those of biases before a batch norm
            torch.testing.assert_close(loops.whole(a.grad), b.grad, rtol=1e-10, atol=1e-12, msg=name)
    for (name, a), (_, b) in zip(parallel.named_buffers(), alone.named_buffers(), strict=True):
        assert relative(loops.whole(a), b) <= 1e-12, name
    own = theirs["x"].grad
    if parallel._calls.binding.passed == "local":
        own = own.chunk(2)[parallel.mesh.coordinates(distributed.get_rank())["dp"]]
    assert relative(ours["x"].grad, own) <= 1e-10


def on_processes() -> None:
    """Tied weights on three stages, rows of each rank, buffers; then a backward that differs on one rank."""
    for name, mesh, options in (
        ("shared", "pp4", {}),
        ("counted", "pp2 dp2", {}),
        ("shared", "pp2 dp2", {"inputs": "local"}),
    ):
        parallel, alone = made(name, mesh, **options)
        alike(parallel, alone, 1, ("loss",))
        alike(parallel, alone, 2, ("layer 1", "scores"))  # the forward runs again
        alike(parallel, alone, 3, ("layer 1", "scores"), times=2)
        parallel.close()
    parallel, _ = made("told", "pp4", outputs="global")
    found = parallel(**batch_of(parallel, 0))
    name = "loss" if distributed.get_rank() < 3 else "scores"
    with pytest.raises(RuntimeError, match="backward from its outputs"):
        summed(found, (name,)).backward()
    parallel.close()
