"""Open options of a step on stages: the fastest by the simulation of its schedule is taken; its numbers are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelined_steps import MESHES, MODELS, made, pipelined_alike
from searched import FAST

import autopar
from autopar import Mesh
from autopar.errors import MemoryLimitError
from autopar.search.solutions.step_choice import TAKEN, TOO_LARGE
from autopar.step.pipelined.solution import PipelinedSolution
from autopar.step.train_step import TrainStep

LONG = {"time_limit": 600.0}  # also where other processes take the time
SEARCHED = {"plan": "search", "machine": FAST}
# model, mesh, policy, micro-batches, options, the number of candidates
ALIKE: dict[str, tuple[str, str, str, Any, dict[str, Any], int]] = {
    "the stages of ZeRO of a given plan": ("layers", "pp2 dp2", "1f1b", 2, {"zero": "search"}, 4),
    "micro-batches of tied layers": ("shared", "pp2 tp2", "interleaved-1f1b", "search", {}, 2),
    "recomputation, of a searched plan": ("layers", "pp2 tp2", "gpipe", 2, {"recompute": "search", **SEARCHED}, 3),
    "all, of a searched plan with a split backward": (
        "shared", "pp2 dp2", "zb-h1", "search", {"recompute": "search", "zero": "search", **SEARCHED}, 6),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_the_numbers_are_those_of_a_single_device(name: str) -> None:
    model, mesh, policy, microbatches, options, count = ALIKE[name]
    step = pipelined_alike(model, MESHES[mesh], policy, microbatches, count=3, clip_norm=0.5, **LONG, **options)
    rows = step.choice.candidates
    assert len(rows) == count and [row.note for row in rows].count(TAKEN) == 1
    assert all(row.nanoseconds is not None for row in rows)
    solution = step.solution
    if "plan" not in options:
        assert solution is None
        return
    assert isinstance(solution, PipelinedSolution) and solution.step == step.choice
    prices = [autopar.price(stage, FAST).nanoseconds for stage in step.program.stages]
    assert [stage.nanoseconds for stage in solution.stages] == prices
    assert all(0 < stage.least <= stage.nanoseconds for stage in solution.stages)
    bounds = [stage.micro.found.least for stage in step._current().micro.stages]
    assert all(bound <= price for bound, price in zip(bounds, prices, strict=True)), "also of a copied parameter"


def step_on_two(**options: Any) -> Any:
    """A captured step of four rows in two stages, each on two ranks of data."""
    step, _, batches = made("layers", MESHES["pp2 dp2"], "1f1b", options.pop("microbatches", 2), **LONG, **options)
    step.capture(**batches(0))
    return step


def test_each_candidate_takes_what_the_closed_step_takes() -> None:
    step = step_on_two(microbatches="search", zero="search")
    rows = step.choice.candidates
    assert [(row.microbatches, row.zero) for row in rows] == [(count, zero) for count in (1, 2) for zero in range(4)]
    for row in rows:
        closed, _, batches = made("layers", MESHES["pp2 dp2"], "1f1b", row.microbatches, rows=4 // row.microbatches,
                                  zero=row.zero)  # fmt: skip
        closed.capture(**batches(0))
        assert row.nanoseconds == round(closed.pipeline.seconds * 1e9) == row.least
        assert row.bytes == max(closed.memory(rank).peak for rank in range(4))
    (taken,) = (row for row in rows if row.note == TAKEN)
    assert taken.nanoseconds == min(row.nanoseconds for row in rows)
    assert (step.choice.microbatches, step.choice.zero) == (taken.microbatches, taken.zero)


def test_the_seconds_of_a_step_have_what_runs_around_the_slots() -> None:
    step = step_on_two(zero=1)
    around = {stage: 0.0 for stage in range(2)}
    for part in step.communication.parts:
        words = part.name.partition(":")[0].split()
        if len(words) == 3:
            around[int(words[1])] += part.times * part.schedule.makespan
    of_all = 0.0
    for name, times in (("sums", 2), ("count", 1)):
        of_all += times * sum(made.makespan for made in step._current().micro.around[name][1].order.schedules)
    simulated = step.pipeline.simulate().makespan
    assert step.pipeline.seconds == pytest.approx(simulated + of_all + max(around.values()))
    assert min(of_all, *around.values()) > 0


def test_a_limit_of_memory_decides() -> None:
    rows = step_on_two(zero="search").choice.candidates
    least = min(row.bytes for row in rows)
    limited = step_on_two(zero="search", memory=least)
    assert max(limited.memory(rank).peak for rank in range(4)) == least
    large = [row.note == TOO_LARGE for row in limited.choice.candidates]
    assert large == [row.bytes > least for row in rows] and 0 < sum(large) < 4
    with pytest.raises(MemoryLimitError, match=r"^none of 4 ways to run the step fits; the one that comes nearest:"):
        step_on_two(zero="search", memory=least - 1)


def test_no_axis_splits_the_batch() -> None:
    step, _, batches = made("layers", {"pp": 2}, "1f1b", 2, zero="search", **LONG)
    step.capture(**batches(0))
    notes = [row.note for row in step.choice.candidates]
    assert notes == [TAKEN, *["no axis splits the batch"] * 3] and step.choice.zero == 0


def test_what_would_change_the_numbers_is_left_out() -> None:
    step, _, batches = made("normed", {"pp": 2}, "1f1b", "search", **LONG)
    step.capture(**batches(0))
    rows = step.choice.candidates
    assert [row.note for row in rows] == [TAKEN, "each micro-batch updates the buffers of the model"]


def test_a_choice_from_the_cache_is_the_choice(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        make, batches, _ = MODELS["layers"]
        parallel = autopar.parallelize(make(4), Mesh(pp=2, dp=2), "ddp", cache=tmp_path)
        step = parallel.train_step(
            torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches="search", schedule="interleaved-1f1b",
            **LONG)  # fmt: skip
        losses = [step.simulate(**batches(8)(k)) for k in range(2)]
        notes = [report.notes[0].partition(" ")[0] for report in step.reports if report.name.endswith("cache")]
        found.append((notes, step.choice, str(step.program), losses))
    (misses, *first), (hits, *second) = found
    assert first == second and (misses, hits) == (["miss:", "miss:"], ["hit:", "hit:"])


CHOICE = """
┏━━━━━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━┳━━━━━━━━━━━┳━━━━━━━┳━━━━━━━━┳━━━━━━━┓
┃ microbatches ┃ recompute ┃ zero ┃ ms a step ┃ bound ┃   peak ┃       ┃
┡━━━━━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━╇━━━━━━━━━━━╇━━━━━━━╇━━━━━━━━╇━━━━━━━┩
│ 1            │ none      │ 0    │    25.688 │       │ 5.0 kB │ taken │
│ 2            │ none      │ 0    │    27.276 │       │ 4.7 kB │       │
└──────────────┴───────────┴──────┴───────────┴───────┴────────┴───────┘
"""
STAGES = """
┏━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━┓
┃ stage ┃ ms in a step ┃  bound ┃                    ┃
┡━━━━━━━╇━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━┩
│     0 │       16.481 │ 16.481 │ no plan is cheaper │
│     1 │       14.174 │ 14.174 │ no plan is cheaper │
└───────┴──────────────┴────────┴────────────────────┘
"""
PROOF = (
    "searched in … s: 25.688 ms a step on fast links, simulated with 1f1b on 2 ranks, 1 micro-batch, and of each stage "
    "no plan is cheaper"
)


def test_how_the_choice_and_the_plans_print() -> None:
    step = step_on_two(microbatches="search", **SEARCHED)
    assert f"\n{step.choice}" == CHOICE
    text = re.sub(r"in \d+\.\d s", "in … s", str(step.solution))
    assert f"\n{text}" == f"{STAGES}{CHOICE[1:]}{PROOF}\n"
    assert step.reports[-1].name == "price" and step.reports[-1].notes == (step.solution.certificate,)


def test_a_step_on_stages_is_of_the_class_of_any_step() -> None:
    assert type(step_on_two()) is TrainStep and not TrainStep.__subclasses__()
