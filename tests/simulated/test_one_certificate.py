"""A searched plan has one price and one bound, wherever they are printed, and they say of what they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_models import MESH, Tower, X, script
from torch import nn

import autopar
from autopar.costs.machine import machine
from autopar.search.certificate import Certificate

H100 = "NVIDIA H100 80GB HBM3"
PRICE = re.compile(r"([\d,.]+) ms a (?:call|step)")


class Words(nn.Module):
    """Labels are counted before the micro-batches, and the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.up = nn.Embedding(64, 32), nn.Linear(32, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.up(self.emb(ids)) @ self.emb.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


IDS = torch.arange(64).reshape(8, 8)


def call() -> Any:
    return autopar.parallelize(Tower(1), MESH, example=(X,), machine=H100)


def step(model: nn.Module, batch: tuple[torch.Tensor, ...], **options: Any) -> Any:
    parallel = autopar.parallelize(model, MESH, machine=H100)
    made = parallel.train_step(torch.optim.AdamW(parallel.parameters()), **options)
    made.capture(batch)
    return made


CASES = {
    "a call": call,
    "a step": lambda: step(Tower(1), (X,), clip_norm=1.0),
    "a step of 2 micro-batches": lambda: step(Words(), (IDS, IDS), microbatches=2, clip_norm=1.0),
    "a step of 4 micro-batches": lambda: step(Tower(2), (X,), microbatches=4, zero=1, recompute="blocks"),
}


@pytest.mark.parametrize("runs", CASES)
@pytest.mark.long
def test_one_price_and_one_bound(runs: str, tmp_path: Path) -> None:
    made = CASES[runs]()
    solution, figures = made.solution, made.figures()
    assert solution.least <= solution.nanoseconds and solution.runs == runs
    assert (figures["seconds"], figures["bound"], figures["gap"]) == (solution.seconds, solution.bound, solution.gap)
    made.page(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    drawn = json.loads(script(text, "drawn"))
    assert json.loads(script(text, "autopar")) == figures and drawn["runs"] == runs
    assert made.reports["price"].notes == (solution.certificate,) == (drawn["certificate"],)
    said = f"{made.reports!s}{solution}{json.dumps(drawn)}"
    assert {*PRICE.findall(said)} == {f"{solution.nanoseconds / 1e6:,.{3 if solution.nanoseconds >= 10_000 else 6}f}"}
    check_rows(solution, runs)
    assert f" ms {runs} on {H100} within 80.0 GB a rank, and " in solution.certificate


def check_rows(solution: Any, runs: str) -> None:
    """They add up to the price; each module stands before those inside of it, and the root is first."""
    assert sum(row.ops + row.transfers for row in solution.modules) == solution.nanoseconds
    ops, moved = (sum(getattr(row, name) for row in solution.modules) for name in ("ops", "transfers"))
    total = next(line for line in str(solution).splitlines() if f"together, {runs} " in line)
    assert [each.strip() for each in total.split("│")[3:5]] == [f"{ops / 1e3:,.1f}", f"{moved / 1e3:,.1f}"]
    names = [row.module.replace("(the model)", "") for row in solution.modules]
    for k, name in enumerate(names):
        assert not any(inside == "" or name.startswith(f"{inside}.") for inside in names[k + 1 :])


def test_what_is_proven_is_never_above_the_price() -> None:
    found = Certificate(machine("cpu"), 9_857_000, 9_522_000.0, 1.0, "")
    assert found.certificate == "searched in 1.0 s: 9.857 ms a call on cpu, and no plan is more than 3.40% cheaper"


def full(made: Any) -> bool:
    return "i64[8 8]" in made.figures()["title"]


@pytest.mark.long
def test_the_usual_batch_is_shown() -> None:
    """And not the shorter last one of an epoch; what was captured is shown until steps of another batch have run."""
    parallel = autopar.parallelize(Words(), MESH, "ddp", dynamic=False)
    made = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    for ids in (IDS, IDS, IDS[:4]):
        made.simulate(ids, ids)
    words = "Words on dp=2 tp=2: a training step with SGD, 1 micro-batch of ids i64[8 8], labels i64[8 8]"
    assert made.figures()["title"] == words and "i64[8/dp 8]" in str(made.program) and words in made._repr_html_()
    assert made.memory().peak == made.figures()["memory"]
    short = made.capture(IDS[:4], IDS[:4])
    assert short == made.program and "i64[4/dp 8]" in str(short) and not full(made)
    made.simulate(IDS, IDS)
    assert full(made)
    made.simulate(IDS[:4], IDS[:4])  # as many as of the other
    assert not full(made)


def test_a_title_names_few_inputs() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
            return self.up(a + b + c + d).sum()

    parallel = autopar.parallelize(Many(), MESH, "ddp", example=(torch.ones(4, 4),) * 4)
    assert parallel.figures()["title"] == (
        "Many on dp=2 tp=2: a call with its backward of a f32[4 4], b f32[4 4], c f32[4 4], …"
    )
