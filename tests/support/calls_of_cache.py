"""What ranks do in tests of the cache: one plans, the others read."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import distributed, nn

import autopar
from autopar.capture import trace

MESH = autopar.Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.beta, self.own = nn.Linear(8, 16), nn.Linear(16, 8), 0.5, 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.own:  # a value that forward reads, and that does not change the program
            x = x * 1.0 if self.own > 100 else x
        return (self.down(torch.relu(self.up(x))) - y).square().mean() * self.beta


class Broken(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"broken on rank {distributed.get_rank()}")


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def _traces() -> list[int]:
    """Counts the traces that this rank makes from now on."""
    count = [0]
    before = trace.Tracer.run

    def run(self: Any) -> Any:
        count[0] += 1
        return before(self)

    trace.Tracer.run = run  # type: ignore[method-assign]
    count.append(before)  # type: ignore[arg-type]
    return count


def _end(count: list[Any]) -> int:
    trace.Tracer.run = count[1]  # type: ignore[method-assign]
    return count[0]


def trained(
    folder: str, plan: Any, own: bool = False, folders: bool = False, options: Any = None
) -> tuple[list[str], int]:
    """Three steps beside eager, in float64. Returns what came of the looks into the cache, and the traces made here.

    Args:
        own: whether each rank has another value of an attribute that forward reads.
        folders: whether each rank has a folder of its own.
        options: of the step.
    """
    rank, model = distributed.get_rank(), Net().double()
    for p in model.parameters():
        distributed.broadcast(p.detach(), 0)
    alone = copy.deepcopy(model)
    model.own = rank * own + own
    count = _traces()
    try:
        cache = f"{folder}/{rank}" if folders else folder
        parallel = autopar.parallelize(model, MESH, plan, cache=cache, timeout=30.0)
        step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=0.1), **(options or {}))
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
        for _ in range(3):
            loss = step(*_batch())
            optimizer.zero_grad()
            expected = alone(*_batch())
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        for p, q in zip(parallel.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-10, atol=1e-10)
        notes = [report.notes[0] for report in step.reports if report.name.endswith("cache")]
    finally:
        traces = _end(count)
    return notes, traces


def called(folder: str) -> tuple[list[str], int]:
    """A call beside eager; the backward of one of two outputs is made of the trace that the first rank has sent."""

    class Two(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            out = self.down(torch.relu(self.up(x)))
            return out.sum(), (out - y).square().mean()

    globals()["Two"], Two.__qualname__ = Two, "Two"
    model = Two().double()
    for p in model.parameters():
        distributed.broadcast(p.detach(), 0)
    alone = copy.deepcopy(model)
    count = _traces()
    try:
        parallel = autopar.parallelize(model, MESH, PLAN, example=_batch(), cache=folder, timeout=30.0)
        parallel(*_batch())[1].backward()
        alone(*_batch())[1].backward()
        for p, q in zip(parallel.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-10)
        return list(parallel.reports["cache"].notes), count[0]
    finally:
        _end(count)


def failed(folder: str) -> str:
    """The error that each rank raises where planning fails on the first."""
    try:
        autopar.parallelize(Broken().double(), MESH, PLAN, example=_batch(), cache=folder, timeout=30.0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def other_model(folder: str) -> str:
    """The last rank passes another model, so the ranks make different calls."""
    model = Net().double()
    if distributed.get_rank() == 3:
        model.beta = 0.25
    try:
        autopar.parallelize(model, MESH, PLAN, example=_batch(), cache=folder, timeout=30.0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unkept(folder: str) -> tuple[list[str], int]:
    """What cannot be kept is captured by each rank."""
    from autopar.cache import codec, shared

    before = codec.guards_to_json

    def refuse(*args: Any) -> Any:
        raise codec.NotCached("this test refuses it")

    codec.guards_to_json = shared.guards_to_json = refuse  # type: ignore[attr-defined]
    try:
        return trained(folder, PLAN)
    finally:
        codec.guards_to_json = shared.guards_to_json = before  # type: ignore[attr-defined]


def slow(folder: str, seconds: float) -> list[str]:
    """Planning takes longer than the time-out of the job."""
    import time

    from autopar.model import compiled

    before = compiled.Compiler.compile

    def compile(self: Any, *args: Any) -> Any:
        time.sleep(seconds if distributed.get_rank() == 0 else 0.0)
        return before(self, *args)

    compiled.Compiler.compile = compile  # type: ignore[method-assign]
    try:
        parallel = autopar.parallelize(Net().double(), MESH, PLAN, example=_batch(), cache=folder, timeout=2.0)
        return list(parallel.reports["cache"].notes)
    finally:
        compiled.Compiler.compile = before  # type: ignore[method-assign]
        assert os.environ is not None


def off_on_one(folder: str) -> list[str]:
    """The cache is off on rank 2 alone."""
    cache: Any = False if distributed.get_rank() == 2 else folder
    parallel = autopar.parallelize(Net().double(), MESH, PLAN, example=_batch(), cache=cache, timeout=30.0)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    step.capture(*_batch())
    assert parallel.reports["cache"].notes == step.reports["cache"].notes
    return list(parallel.reports["cache"].notes)


def on_best_mesh(folder: str, without: int | None = None) -> tuple[list[str], int]:
    """The mesh is chosen, too. ``without``: a rank whose cache is off."""
    model = Net().double()
    for p in model.parameters():
        distributed.broadcast(p.detach(), 0)
    alone, count = copy.deepcopy(model), _traces()
    try:
        cache = False if distributed.get_rank() == without else folder
        parallel = autopar.parallelize(model, autopar.devices(4), example=_batch(), cache=cache, timeout=30.0)
        torch.testing.assert_close(parallel(*_batch()), alone(*_batch()), rtol=1e-10, atol=1e-10)
        return [report.notes[0] for report in parallel.reports if report.name.startswith("cache")], count[0]
    finally:
        _end(count)
