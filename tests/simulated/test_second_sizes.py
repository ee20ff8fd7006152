"""A call or a step of a second size takes the layouts of the first capture, and nothing is searched for it."""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from casts import promoted_casts  # noqa: F401
from equality import TOLERANCE
from sized_models import Mlp, difference, made
from torch import nn

import autopar
from autopar import Mesh
from autopar.capture.arguments import bind_arguments, signature_of
from autopar.capture.guards import Guards
from autopar.capture.model_state import model_state
from autopar.errors import MemoryLimitError
from autopar.model import captures as kept_captures
from autopar.model import planner
from autopar.model.captures import Captures, SizedCaptures
from autopar.model.rank_context import RankContext

pytestmark = pytest.mark.usefixtures("promoted_casts")
MESH = Mesh(dp=2, tp=2)
SPLIT: Any = ["search", {"x": ("dp", None, None), "up.weight": ("tp", None)}]  # small calls are not split else


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of searches."""
    count, search = [0], planner.search

    def counted(*args: Any, **options: Any) -> Any:
        count[0] += 1
        return search(*args, **options)

    monkeypatch.setattr(planner, "search", counted)
    return count


def said(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "autopar"]


def without_sizes(parallel: Any) -> list[str]:
    """The axes of all layouts of the plan."""
    values = {name: (row.gives, row.needs) for name, row in parallel.solution.values.items()}
    return [re.sub(r"\d+", "n", f"{name} {row}") for name, row in values.items()]


class Rows(nn.Module):
    """Merges the batch with another dim, which a search may split, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12, dtype=torch.float64), nn.Linear(12, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).flatten(0, 1).relu()) - y.flatten(0, 1)).square().mean()


def rows(batch: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, 5, 6, dtype=torch.float64), "y": torch.randn(batch, 5, 6, dtype=torch.float64)}


@pytest.mark.parametrize("dynamic", [None, False])
def test_calls_of_a_second_size_have_the_layouts_of_the_first(searches: list[int], dynamic: bool | None) -> None:
    model = Rows()
    parallel: Any = autopar.parallelize(model, MESH, SPLIT, dynamic=dynamic, cache=False)
    assert difference(parallel, parallel.simulate, model, rows(8)) <= TOLERANCE
    first, searched, layouts = searches[0], without_sizes(parallel), parallel.solution.values["param up.weight"]
    assert first and any("n/dp" in row for row in searched)
    for batch in (16, 3, 1):  # an even batch, an uneven one, and one that is too short to be split
        assert difference(parallel, parallel.simulate, model, rows(batch)) <= TOLERANCE
        assert searches[0] == first and parallel.solution.values["param up.weight"] == layouts
        if batch == 16:
            assert without_sizes(parallel) == searched
        assert "so nothing is proven" in parallel.solution.certificate
    notes = [note for report in parallel.reports for note in report.notes]
    assert "the layouts are those of the first capture, of other sizes; nothing was searched" in notes


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "zero": 1}], ids=str)
def test_steps_of_a_second_size_have_the_layouts_of_the_first(searches: list[int], options: Any) -> None:
    model = Rows()
    alone = copy.deepcopy(model)
    parallel: Any = autopar.parallelize(model, MESH, SPLIT, cache=False)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=0.1), **options)
    optimizer, homes, first = torch.optim.AdamW(alone.parameters(), lr=0.1), [], 0
    for batch in (8, 4, 8, 2):
        inputs = rows(batch)
        optimizer.zero_grad()
        expected = alone(**inputs)
        expected.backward()
        optimizer.step()
        assert abs(float(step.simulate(inputs)) - float(expected.detach())) <= TOLERANCE
        homes.append({n: t for n, t in step.solution.values.items() if n.startswith("param")})
        first = first or searches[0]
        assert searches[0] == first and homes[-1] == homes[0]
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_another_mode_has_a_plan_of_its_own(searches: list[int]) -> None:
    model, inputs = made("mlp")
    parallel: Any = autopar.parallelize(model, MESH, "search", cache=False)
    counts = []
    for training, batch in ((True, 8), (False, 8), (True, 4), (False, 4)):
        model.train(training)
        assert difference(parallel, parallel.simulate, model, inputs(batch, 0)) <= TOLERANCE
        counts.append(searches[0])
    assert counts == [1, 2, 2, 2]


def test_a_batch_that_does_not_fit_is_searched(searches: list[int]) -> None:
    """The plan of a short batch keeps more on each rank than a limit of memory lets a long one."""
    model = Mlp().double()
    parallel: Any = autopar.parallelize(model, MESH, "search", memory=20_000.0, dynamic=False, cache=False)
    x = torch.randn(2, 8, dtype=torch.float64)
    parallel.simulate(x=x)
    first = searches[0]
    parallel.simulate(x=x.repeat(2, 1))
    assert searches[0] == first
    with pytest.raises(MemoryLimitError):
        parallel.simulate(x=x.repeat(200, 1))
    assert searches[0] > first


@pytest.mark.parametrize("seconds", [2.5, 1.5])
def test_a_late_capture_says_so(monkeypatch: pytest.MonkeyPatch, caplog: Any, seconds: float) -> None:
    """In one line, with the remedy: not the first capture, and none that is known. A clock ticks at each look."""
    ticks = itertools.count(step=seconds)
    monkeypatch.setattr(kept_captures, "clock", lambda: next(ticks))
    model, inputs = made("mlp")
    parallel: Any = autopar.parallelize(model, Mesh(dp=2), "ddp", cache=False)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    for run, what in ((parallel.simulate, inputs), (step.simulate, inputs)):
        caplog.clear()
        run(what(8, 0)["x"])
        assert not said(caplog)
        for _ in range(2):
            run(what(4, 0)["x"])
        assert said(caplog) == [
            "autopar: the loop has waited 2.5 s for capture 2 of this model: x is float64[4, 8] on cpu, it was "
            "float64[8, 8] on cpu; pad it to the usual size, leave it out with DataLoader(…, drop_last=True), or give "
            "parallelize(…, dynamic=True), whose first capture serves all sizes"
        ] * (seconds > 2)
    caplog.clear()
    model.eval()
    parallel.simulate(**inputs(8, 0))
    assert said(caplog) == [
        "autopar: the loop has waited 2.5 s for capture 3 of this model; capture it before the loop with .capture(…), "
        "or keep the call as it was"
    ] * (seconds > 2)


class Rooted(Mlp):
    """Divides by a root of a size, for which there is no symbol."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / x.shape[0] ** 0.5


@pytest.mark.parametrize(
    ("kind", "dynamic", "helps"),
    [(Rooted, True, False), (Rooted, None, False), (Rooted, False, True), (Mlp, None, True)],
)
def test_symbols_are_offered_where_they_may_help(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: type[Mlp], dynamic: bool | None, helps: bool
) -> None:
    monkeypatch.setattr(kept_captures, "clock", itertools.count(step=9.0).__next__)
    parallel: Any = autopar.parallelize(kind().double(), Mesh(dp=2), "ddp", dynamic=dynamic, cache=False)
    for batch in (8, 4):
        parallel.simulate(torch.ones(batch, 8, dtype=torch.float64))
    (line,) = said(caplog)
    pads = "pad it to the usual size, or leave it out with DataLoader(…, drop_last=True)"
    assert line.endswith(f"; {pads}") is not helps and ("dynamic=True" in line) is helps


def test_only_the_first_rank_says_it(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(kept_captures, "clock", itertools.count(step=9.0).__next__)
    model, inputs = made("mlp")
    captures = Captures[Any]()
    key = (signature_of(model_state(model), bind_arguments(model, (), inputs(8, 0))), ((), ()))
    captures.add(captures.call(key, []), Guards((), ()), None)
    other = captures.call((replace(key[0], tensors=()), ((), ())), [])
    for rank in (1, 0):
        with kept_captures.said_if_late(RankContext(rank), captures, other, SizedCaptures(model)):
            pass
        assert len(said(caplog)) == (rank == 0)
