"""Loops of newcomers on real processes: an optimizer or a call that belongs to the other of two models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import autopar
from autopar import Mesh


def model_of(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def step(call: Any, optimizer: torch.optim.Optimizer) -> None:
    call(torch.ones(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def warned(loop: Any, *args: Any) -> tuple[list[str], Any]:
    """The warnings of a loop, with the line where each is shown, and what the loop returns."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        result = loop(*args)
    return [f"{each.filename.rpartition('/')[2]}: {each.message}" for each in shown], result


def untrained(case: str) -> tuple[list[str], bool]:
    """What is printed in three steps, and whether the first optimizer step still looks."""
    model = model_of("meta" if case == "earlier" else "cpu")
    early = torch.optim.AdamW(model.parameters())
    parallel = autopar.parallelize(model, Mesh(dp=2))
    if case == "dropped":  # the optimizer is all that is left of the original
        model = parallel
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1) if case in ("original", "earlier") else early
    if case == "earlier":
        parallel.initialize()
    call = model if case == "original" else parallel

    def loop() -> None:
        for _ in range(3):
            step(call, optimizer)

    shown, _ = warned(loop)
    first_step = parallel._calls.captures.first_step
    return shown, first_step._end.alive


def trained(case: str) -> tuple[list[str], bool]:
    """The same of loops that use the original as they may."""
    model = model_of()
    parallel = autopar.parallelize(model, Mesh(dp=2))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    shown, _ = warned(lambda: [None for _ in LOOPS[case](model, parallel, optimizer)])
    return shown, parallel._calls.captures.first_step._end.alive


def _plain(model: nn.Module, parallel: Any, optimizer: Any) -> Iterator[None]:
    optimizer.step()  # as before a scheduler: nothing has a gradient yet
    yield step(parallel, optimizer)


def _teacher(model: nn.Module, parallel: Any, optimizer: Any) -> Iterator[None]:
    """The original is a teacher without gradients, and another model has an optimizer of its own."""
    other = nn.Linear(4, 4)
    critic = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(4, 4))
        step(other, critic)
        yield step(parallel, optimizer)


def _reference(model: nn.Module, parallel: Any, optimizer: Any) -> Iterator[None]:
    """The original is trained beside it, and before it."""
    beside = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 4)).sum().backward()
    for _ in range(2):
        parallel(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        beside.step()
        yield


def _averaged(model: nn.Module, parallel: Any, optimizer: Any) -> Iterator[None]:
    """A copy of it is an average of weights, which has no gradient."""
    average = torch.optim.swa_utils.AveragedModel(parallel)
    step(parallel, optimizer)
    average.update_parameters(parallel)
    kept = copy.deepcopy(parallel)
    yield step(kept, torch.optim.SGD(kept.parameters(), lr=0.1))


LOOPS = {"plain": _plain, "teacher": _teacher, "reference": _reference, "averaged": _averaged}
