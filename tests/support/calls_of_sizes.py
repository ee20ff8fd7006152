"""Calls and steps of many sizes on each of several processes."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
from sized_models import loss_of, made

import autopar
from autopar import Mesh
from autopar.cache import codec
from autopar.cache.folder import NotCached
from autopar.capture import trace
from autopar.model import planner

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


def second_sizes(folder: str, refused: bool = False) -> tuple[list[list[str]], int]:
    """Steps of three sizes beside eager, with a searched plan. Returns what this rank traced and searched at each size.

    Args:
        refused: whether the captures with symbols cannot be written, so that each rank makes them.
    """
    done: list[str] = []

    def counted(what: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            done.append(what)
            return function(*args, **options)

        return call

    def texts(kind: Any, made: Any) -> Any:
        if refused and getattr(made, "captured", None) is not None and made.captured.symbolic is not None:
            raise NotCached("this test refuses it")
        return written(kind, made)

    torch.manual_seed(0)
    written, (model, inputs) = codec.texts_of, made("mlp")
    eager = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), ["search", {"x": ("dp", None)}], cache=folder, timeout=30.0)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    found = []
    with (
        mock.patch.object(trace.Tracer, "run", counted("trace", trace.Tracer.run)),
        mock.patch.object(planner, "search", counted("search", planner.search)),
        mock.patch("autopar.cache.cache.texts_of", texts),
    ):
        for batch in (8, 4, 8, 3):
            given = inputs(batch, 0)
            optimizer.zero_grad()
            expected = loss_of(eager(**given))
            expected.backward()
            optimizer.step()
            assert abs(float(step(given)) - float(expected.detach())) <= 1e-12
            found.append(list(done))
            done.clear()
    for p, q in zip(parallel.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-10, atol=1e-10)
    return found, step.captures
