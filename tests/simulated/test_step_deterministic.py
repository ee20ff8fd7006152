"""Deterministic steps: the same bits on every run; ``torch.use_deterministic_algorithms`` is heard."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import loops
import pytest
import torch
from processes import ranks
from steps import adamw, run
from torch import distributed, nn

import autopar
from autopar import Mesh


@contextlib.contextmanager
def deterministic(mode: int | str = "error") -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class Dropped(nn.Module):
    """Rows of a table, some of them several times in a batch, dropout, and a loss over classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 64))
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = nn.functional.dropout(torch.relu(self.up(self.table[ids])), 0.3)
        return nn.functional.cross_entropy(self.down(h).flatten(0, 1), ids.flatten())


PLAN = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}


def trained(seed: int = 0) -> dict[str, torch.Tensor]:
    """The parameters after three steps, and the optimizer's state."""
    with deterministic():
        torch.manual_seed(0)
        parallel = autopar.parallelize(Dropped(), Mesh(dp=2, tp=2), PLAN)
        step = parallel.train_step(adamw(parallel), microbatches=2, zero=1, clip_norm=1.0)
        ids = torch.randint(40, (16, 64))
        torch.manual_seed(seed)
        for _ in range(3):
            run(step, ids, promoted=False)
    found = {name: loops.whole(parameter).detach().clone() for name, parameter in parallel.named_parameters()}
    return found | {
        f"{k}.{name}": loops.whole(value).detach().clone()
        for k, one in enumerate(step.optimizer.state.values())
        for name, value in one.items()
    }


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    """What is not the same, bit for bit."""
    assert a.keys() == b.keys()
    return {name for name, value in a.items() if not torch.equal(value, b[name])}


@pytest.mark.processes
def test_two_runs_have_the_same_bits() -> None:
    """Dropout, micro-batches and ZeRO, on four processes, in each of which strings have other hashes. Another seed
    drops others."""
    runs = [*ranks(4).run(trained), *ranks(4).run(trained)]
    assert all(not differing(runs[0], one) for one in runs[1:])
    assert differing(runs[0], ranks(4).run(trained, 1)[0]) == {name for name in runs[0] if not name.endswith(".step")}


def looked_up(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rows of a table after a step in which each was read often."""
    torch.manual_seed(0)
    parallel = autopar.parallelize(Dropped(), Mesh(dp=1), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), microbatches=2)
    step(ids)
    return {name: parameter.detach().clone() for name, parameter in parallel.named_parameters()}


@pytest.mark.long
def test_on_several_threads() -> None:
    """Without the mode, the gradients of the table differ from run to run: threads add to a row as they come."""
    threads = torch.get_num_threads()
    ids = torch.randint(40, (64, 256))
    try:
        torch.set_num_threads(2)
        with deterministic():
            runs = [looked_up(ids) for _ in range(3)]
    finally:
        torch.set_num_threads(threads)
    assert not differing(runs[0], runs[1]) and not differing(runs[0], runs[2])


def put(x: torch.Tensor) -> torch.Tensor:
    return x.put(torch.arange(4), torch.ones(4))


def unpool(x: torch.Tensor) -> torch.Tensor:
    pooled, places = nn.functional.max_pool2d(x.reshape(-1, 1, 2, 4), 2, return_indices=True)
    return nn.functional.max_unpool2d(pooled, places, 2).flatten(1)


class Applied(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.up(x)).square().mean()


def made(function: Callable[[torch.Tensor], torch.Tensor], ranks: int = 2) -> Any:
    parallel = autopar.parallelize(Applied(function), Mesh(dp=ranks), "ddp")
    return parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("function", [put, unpool])
def test_an_op_without_a_deterministic_kernel_is_refused(
    function: Callable[[torch.Tensor], torch.Tensor], count: int
) -> None:
    """Torch's own error, with the user's line, of the capture or of the run: torch looks in kernels, and fake ones are
    kept from other captures. Nothing is changed. Before and afterwards, without the mode, the step runs."""
    step, x = made(function, count), torch.randn(4, 8)
    calls = (step, step.parallel) if count == 1 else (step.simulate, step.parallel.simulate)
    calls[0](x)
    before = [parameter.clone() for parameter in step.parallel.parameters()]
    for call in calls:
        with (
            deterministic(),
            pytest.raises(RuntimeError, match="does not have a deterministic implementation") as caught,
        ):
            call(x)
        lines = "\n".join(getattr(caught.value, "__notes__", []))
        assert (
            f"test_step_deterministic.py:{function.__code__.co_firstlineno + (1 if function is put else 2)}" in lines
            or sys.version_info < (3, 11)
        ), lines
    assert all(torch.equal(a, b) for a, b in zip(before, step.parallel.parameters(), strict=True))
    calls[0](x)
    assert not any(torch.equal(a, b) for a, b in zip(before, step.parallel.parameters(), strict=True))


def test_the_mode_is_part_of_what_a_capture_is_keyed_by() -> None:
    step, x = made(torch.relu), torch.randn(4, 8)
    for mode, captures in (("default", 1), ("error", 2), ("warn", 3), ("error", 3), ("default", 3)):
        with deterministic(mode):
            step.simulate(x)
        assert step.captures == captures


def one_rank_alone() -> None:
    """Ranks of which one alone asks for it are told so."""
    step, x = made(torch.relu), torch.randn(4, 8)
    rank = distributed.get_rank()
    with (
        deterministic("error" if rank else "default"),
        pytest.raises(RuntimeError, match=r"the ranks make different calls(.*\n)*.*rank 1: .* deterministically"),
    ):
        step(x)


@pytest.mark.processes
def test_all_ranks_are_in_one_mode() -> None:
    ranks(2).run(one_rank_alone)
