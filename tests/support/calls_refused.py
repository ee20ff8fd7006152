"""Make calls that a model on processes refuses: wrong ones, and ones that differ between the ranks."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from calls_of_models import MESH, language
from error_texts import refused
from models import COLUMN_ROW, Block
from processes import device_mesh
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate

import autopar
from autopar import Mesh


def bad_calls() -> None:
    model, _, ids, labels = language()
    rank = distributed.get_rank()
    assert (
        "the mesh (dp=2) has 2 ranks, and there are 4 processes; start one for each, as with torchrun "
        "--nproc-per-node 2" in refused(ValueError, lambda: autopar.parallelize(model, Mesh(dp=2)))
    )
    assert "inputs='mine' is none of 'global', 'local'" in refused(
        ValueError, lambda: autopar.parallelize(model, MESH, inputs="mine")
    )
    assert "outputs='mine' is none of" in refused(ValueError, lambda: autopar.parallelize(model, MESH, outputs="mine"))
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
    for _ in range(2):  # captured or not
        said = refused(RuntimeError, functools.partial(parallel, ids[: 4 - (rank == 2)], labels[: 4 - (rank == 2)]))
        assert (
            "the ranks make different calls" in said and "rank 2: call (ids int64[3, 6], labels int64[3, 6])" in said
        ), said
        assert "ranks 0 1 3: call (ids int64[4, 6], labels int64[4, 6])" in said
        parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
        parallel(ids, labels), parallel(ids[:3], labels[:3])
    assert "to simulate, call parallelize in a process that is alone" in refused(
        RuntimeError, lambda: parallel.simulate(ids, labels)
    )
    parallel.body.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    assert "the parameter body.extra was added after parallelize; change the model first" in refused(
        ValueError, lambda: parallel(ids, labels)
    )
    on_meta = autopar.parallelize(copy.deepcopy(model).to("meta"), MESH, COLUMN_ROW)
    assert "is on the meta device and has no values" in refused(ValueError, lambda: on_meta(ids, labels))
    pending = DTensor.from_local(
        torch.ones(4, 8, dtype=torch.float64), device_mesh(MESH), (Replicate(), autopar_partial())
    )
    block = autopar.parallelize(Block().double(), MESH, COLUMN_ROW)
    assert "redistribute it, so that it is not Partial" in refused(ValueError, lambda: block(pending))


def autopar_partial() -> Any:
    from torch.distributed.tensor import Partial

    return Partial()


class Two(nn.Module):
    """Two outputs, the backwards of which have all-reduces of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block().double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.block(x)
        return y.square().mean(), y.sin().mean()


def values_that_differ() -> None:
    """Ranks that bring other values of what is one: a batch, a piece, the gradient of a loss made outside."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model, x = Block().double(), torch.randn(8, 8, dtype=torch.float64)
    other = x.flip(0) if rank == 2 else x
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW, outputs="global")
    said = refused(RuntimeError, lambda: parallel(other))
    assert (
        "ranks 0 and 2 bring different values of x, which must be equal on these ranks\n  pass the whole "
        "batch on each rank, as autopar.data.sharded gives it (a DistributedSampler gives each rank other rows), "
        'or let each pass its own rows: parallelize(…, inputs="local")' in said
    )
    pieces = autopar.parallelize(model, MESH, COLUMN_ROW, inputs="local")
    # as a DistributedSampler over all ranks gives them
    said = refused(RuntimeError, lambda: pieces(x[rank : rank + 1]))
    assert (
        "ranks 0 and 1 bring different values of x, which must be equal on these ranks: both hold the piece at dp=0"
        in said
    )
    assert "a DistributedSampler takes num_replicas=2 and rank=mesh.coordinates(rank)['dp']" in said
    pieces(x[MESH.coordinates(rank)["dp"] :][:1])
    y = parallel(x)
    said = refused(RuntimeError, (y.sum() if rank != 2 else y.square().sum()).backward)
    assert "ranks 0 and 2 bring different values of the gradient of output 0" in said
    parallel.zero_grad()
    parallel(x).sum().backward()


def backwards_that_differ() -> None:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    two = autopar.parallelize(Two(), MESH, COLUMN_ROW)
    one, other = two(x)
    said = refused(RuntimeError, (one if rank == 1 else other).backward)
    assert (
        "rank 1: backward of call 1 from its outputs 0" in said
        and "ranks 0 2 3: backward of call 1 from its outputs 1" in said
    )
    two = autopar.parallelize(Two(), MESH, COLUMN_ROW)
    first, second = two(x)[0], two(x * 2)[0]
    said = refused(RuntimeError, (first if rank != 3 else second).backward)
    assert "rank 3: backward of call 2" in said


def modes_that_differ() -> None:
    """Captured before or not."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    for known in (False, True):
        parallel = autopar.parallelize(Block().double(), MESH, COLUMN_ROW)
        parallel(x)
        if known:
            parallel.eval()(x)
        parallel.train(rank != 1)
        said = refused(RuntimeError, lambda: parallel(x))  # noqa: B023
        assert (
            "rank 1: call (x float64[8, 8]) in eval" in said and "ranks 0 2 3: call (x float64[8, 8]) in train" in said
        )
        parallel = autopar.parallelize(Block().double(), MESH, COLUMN_ROW)
        parallel(x)
        if known:
            with torch.no_grad():
                parallel(x)
        with torch.set_grad_enabled(rank != 1):
            said = refused(RuntimeError, lambda: parallel(x))  # noqa: B023
        assert "rank 1: call (x float64[8, 8]) in train without gradients" in said
