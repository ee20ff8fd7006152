"""Open options of a step: the cheapest candidate that fits is taken, and each costs what a closed step does."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import steps
import torch
from searched import FAST
from torch import nn

import autopar
from autopar import Mesh
from autopar.errors import MemoryLimitError, PlanError
from autopar.search.solutions.artifact import from_json
from autopar.search.solutions.step_choice import DEARER, LATE, TAKEN, TOO_LARGE, Candidate, StepChoice, choice_from
from autopar.step.batches.batches import MicroBatches
from autopar.step.captures import StepCaptures
from autopar.step.choices import _Comparison

pytestmark = pytest.mark.long

MESH = Mesh(dp=2, tp=2)
H100 = "NVIDIA H100 80GB HBM3"
OPEN = {"microbatches": "search", "recompute": "search", "zero": "search"}


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, size: int = 256, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(Block(size)) for _ in range(2)))
        self.norm = nn.BatchNorm1d(size) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(x)).square().mean()


X = torch.empty(32, 256, device="meta")


def captured(x: torch.Tensor = X, plan: Any = None, norm: bool = False, mesh: Mesh = MESH, **options: Any) -> Any:
    with torch.device("meta"):
        model = Model(x.shape[1], norm)
    parallel = autopar.parallelize(model, mesh, plan, machine=H100)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), **{"memory": math.inf, **options})
    step.capture(x)
    return step


def closed(row: Candidate, **options: Any) -> Any:
    return captured(microbatches=row.microbatches, recompute=row.recompute, zero=row.zero, **options)


@pytest.mark.parametrize(
    "part", [1.0, pytest.param(0.4, marks=pytest.mark.sweep("other tests take a choice within a limit that binds"))]
)
def test_each_candidate_costs_what_a_closed_step_does(part: float) -> None:
    """Also those that a bound has left out: none of them is cheaper."""
    limit = part * captured().memory().peak
    step = captured(microbatches="search", recompute="search", memory=limit)
    choice, solution = step.choice, step.solution
    assert step.memory().peak <= limit == solution.memory
    assert [(row.microbatches, row.recompute) for row in choice.candidates] == list(
        itertools.product([1, 2, 4, 8, 16], [None, "min-cut", "blocks"])
    )
    (taken,) = (row for row in choice.candidates if row.note == TAKEN)
    assert (solution.microbatches, solution.recompute, solution.zero) == (taken.microbatches, taken.recompute, 0)
    assert solution.nanoseconds == taken.nanoseconds and step.memory().peak == taken.bytes
    for row in choice.candidates[:6]:
        try:
            other = closed(row, memory=limit).solution
        except MemoryLimitError:
            assert row.note in (TOO_LARGE, DEARER)
            continue
        assert other.nanoseconds >= taken.nanoseconds and row.least <= other.nanoseconds + 1
        assert row.nanoseconds in (None, other.nanoseconds) and row.note in (TAKEN, DEARER, "")
    assert solution.least <= taken.nanoseconds
    if part == 1.0:
        assert solution.exact and (taken.microbatches, taken.recompute) == (1, None)
        assert str(step.program) == str(captured().program), "a limit that does not bind changes nothing"


@pytest.mark.parametrize(("name", "part"), [
    ("microbatches", 0.5),
    pytest.param("recompute", 0.77, marks=pytest.mark.sweep("test_step_processes chooses among all within a limit")),
])  # fmt: skip
def test_a_binding_limit_cuts_the_batch_or_computes_again(name: str, part: float) -> None:
    x = torch.empty(4096, 256, device="meta")
    limit = part * captured(x).memory().peak
    with pytest.raises(MemoryLimitError):
        captured(x, memory=limit)
    step = captured(x, memory=limit, **{name: "search"})
    assert step.memory().peak <= limit and step.choice.candidates[0].note == TOO_LARGE
    assert getattr(step.solution, name) not in (1, None)
    table = str(step.solution)
    assert "microbatches" in table and TOO_LARGE in table and "taken" in table


def test_stages_are_compared_where_the_search_has_no_proof() -> None:
    limit = 0.6 * captured(zero="search").memory().peak
    step = captured(zero="search", memory=limit)
    stages = [row for row in step.choice.candidates if row.zero != "search"]
    assert step.choice.candidates[0].zero == "search" and [row.zero for row in stages] == [0, 1, 2, 3]
    prices = [row.nanoseconds for row in step.choice.candidates if row.nanoseconds is not None]
    assert step.solution.nanoseconds == min(prices) and step.memory().peak <= limit
    for row in stages:
        try:
            other = closed(row, memory=limit).solution.nanoseconds
        except MemoryLimitError:
            continue
        assert step.solution.nanoseconds <= other and step.solution.least <= other


def test_a_plan_that_is_given_has_the_prices_of_the_stages() -> None:
    step = captured(plan="megatron", zero="search")
    assert step.solution is None and [row.zero for row in step.choice.candidates] == [0, 1, 2, 3]
    prices = [autopar.price(captured(plan="megatron", zero=z).program, H100).nanoseconds for z in range(4)]
    assert [row.nanoseconds for row in step.choice.candidates] == prices
    assert step.choice.zero == prices.index(min(prices))
    peak = min(row.bytes for row in step.choice.candidates)
    limited = captured(plan="megatron", zero="search", memory=peak)
    assert limited.memory().peak == peak
    with pytest.raises(
        MemoryLimitError, match=r"^none of 4 ways to run the step fits; the one that comes nearest:\nthe plan"
    ):
        captured(plan="megatron", zero="search", memory=peak - 1)


def test_one_device_has_no_stages() -> None:
    step = captured(mesh=Mesh(dp=1), **OPEN)
    assert {row.zero for row in step.choice.candidates} == {0} and step.choice.microbatches == 1


def test_what_would_change_the_numbers_is_left_out() -> None:
    step = captured(X[:8], norm=True, microbatches="search")
    assert [row.note for row in step.choice.candidates[1:]] == ["each micro-batch updates the buffers of the model"] * 2
    batches = MicroBatches(MESH, 2, lambda named: {})
    parallel = autopar.parallelize(Model(8), MESH, "ddp")
    bound = [parallel._calls.bound((torch.ones(rows, 8),), {}) for rows in (1, 2, 12)]
    assert [batches.counts(arguments) for arguments in bound] == [[1], [1], [1, 2, 3, 4, 6]]


def test_a_model_without_blocks() -> None:
    with torch.device("meta"):
        parallel = autopar.parallelize(steps.Squared(nn.Linear(8, 8)), MESH, machine=H100)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), recompute="search", memory=math.inf)
    step.capture(torch.empty(16, 8, device="meta"))
    assert step.choice.candidates[2].note == "the model has no blocks" and step.solution.exact


def test_no_time_is_left() -> None:
    step = captured(recompute="search", time_limit=0.0)
    assert [row.note for row in step.choice.candidates] == [TAKEN, LATE, LATE]
    assert step.solution.least == pytest.approx(step.solution.nanoseconds - step._current().micro.found.nanoseconds)
    assert "another number of micro-batches, recomputation or stage may be cheaper" in step.solution.certificate


@pytest.mark.parametrize(
    ("seconds", "counts", "words"),
    [
        (0.0, [1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 16], "none of 15 ways to run the step fits; the one that"),
        (61.0, [1, 16, 16, 16], "none of 4 ways to run the step fits, and 11 more were not searched in the time limit"),
        (999.0, [1], "the first way to run the step does not fit, and 14 more were not searched in the time limit:\n"),
    ],
)  # fmt: skip
def test_where_nothing_fits_in_time(
    seconds: float, counts: list[int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the limit only the smallest micro-batches are tried, and not for ever."""
    tried: list[int] = []

    def fails(self: StepCaptures, *given: Any, **more: Any) -> Any:
        tried.append(self._options.count)
        raise MemoryLimitError("too large")

    monkeypatch.setattr(StepCaptures, "tried", fails)
    monkeypatch.setattr(_Comparison, "_elapsed", lambda self: seconds if tried else 0.0)
    with pytest.raises(MemoryLimitError, match=words):
        captured(microbatches="search", recompute="search")
    assert tried == counts


def test_each_batch_has_its_own_choice() -> None:
    step = captured(microbatches="search")
    first = step.choice
    step.capture(X[:2])
    assert [row.microbatches for row in step.choice.candidates] == [1] and step.captures == 2
    step.capture(X)
    assert step.choice == first and step.captures == 2


def test_the_file_keeps_the_choice(tmp_path: Any) -> None:
    captured(microbatches=4, recompute="blocks").solution.save(tmp_path / "plan.json")
    step = captured(plan=str(tmp_path / "plan.json"), microbatches="search", recompute="search")
    assert (step.solution.microbatches, step.solution.recompute) == (4, "blocks")
    assert len(step.choice.candidates) == 1
    captured(**OPEN).solution.save(tmp_path / "plan.json")
    step = captured(plan=str(tmp_path / "plan.json"), **OPEN)
    content = json.loads((tmp_path / "plan.json").read_text())
    assert from_json(content).step == choice_from(content["step"]) != step.choice
    assert len(from_json(content).step.candidates) == 15 and step.solution.recompute is None
    with pytest.raises(PlanError, match=r"plan: step: .* is no choice of options of a step"):
        from_json({**content, "step": {"microbatches": 2}})
    for wrong in (
        {"zero": "most"},
        {"recompute": 3},
        {"microbatches": -1},
        {"stages": {"up": "1"}},
        {"candidates": [1]},
    ):
        with pytest.raises(PlanError, match=r"plan: step: .* is no choice of options of a step"):
            from_json({**content, "step": {**content["step"], **wrong}})
    assert replace(StepChoice(), candidates=(Candidate(1, ("*.up", "*.down"), least=math.inf),)).to_json()["candidates"]


@pytest.mark.parametrize(
    "memory", [None, pytest.param(20e3, marks=pytest.mark.sweep("it has a smaller limit and none")), 12e3]
)
def test_the_numbers_are_those_of_a_single_device(memory: float | None) -> None:
    options = {**OPEN, "clip_norm": 0.1, **({} if memory is None else {"memory": memory})}
    steps.steps_alike("mlp", {"dp": 2, "tp": 2}, options, count=3, layers=1, searched_on=FAST)


@pytest.mark.parametrize(("name", "text"), [
    ("microbatches", r"microbatches='most' is no number of micro-batches; give 1 or more, or \"search\""),
    ("zero", "zero='most' is no stage of ZeRO: .* and \"search\" chooses for each parameter"),
])  # fmt: skip
def test_other_words_are_refused(name: str, text: str) -> None:
    parallel = autopar.parallelize(Model(8), MESH, "ddp")
    with pytest.raises(ValueError, match=text):
        parallel.train_step(torch.optim.SGD(parallel.parameters()), **{name: "most"})
