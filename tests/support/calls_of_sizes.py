"""Calls and steps of many sizes on each of several processes."""

from __future__ import annotations

import copy

import torch
from sized_models import loss_of, made

import autopar
from autopar import Mesh

MESHES = {2: Mesh(dp=2), 4: Mesh(dp=2, tp=2)}


def one_capture_serves_many_sizes(name: str, ranks: int) -> None:
    """Outputs and losses are those of a single device, batches that the ranks cannot split evenly among them."""
    torch.manual_seed(0)
    model, inputs = made(name)
    parallel = autopar.parallelize(model, MESHES[ranks], None if ranks == 4 else "ddp", dynamic=True, outputs="global")
    for batch, length in ((8, 10), (3, 7), (5, 10)):
        given = inputs(batch, length)
        expected = loss_of(copy.deepcopy(model)(**given))
        loss = loss_of(parallel(**given))
        assert abs(float(loss) - float(expected)) <= 1e-6
        loss.backward()
        assert parallel.captures == 1


def pieces_of_many_sizes() -> None:
    """Each rank brings its own piece, the last one is shorter; a training step goes on with one capture."""
    torch.manual_seed(0)
    model, inputs = made("mlp")
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp", dynamic=True, inputs="local")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    optimizer, rank = torch.optim.SGD(eager.parameters(), lr=0.1), torch.distributed.get_rank()
    for batch in (8, 4, 6):
        given = inputs(batch, 0)
        optimizer.zero_grad()
        expected = loss_of(eager(**given))
        expected.backward()
        optimizer.step()
        loss = step({"x": given["x"].chunk(2)[rank]})
        assert abs(float(loss) - float(expected)) <= 1e-12
        assert step.captures == 1, (step.captures, step.reports["capture"].notes)
