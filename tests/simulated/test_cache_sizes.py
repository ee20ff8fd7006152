"""Calls of a second size, and captures with symbols, come from the cache: they serve the sizes that they did before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import TOLERANCE
from sized_models import difference
from torch import nn

import autopar
from autopar.cache.kept_capture import symbols_of, symbols_to_json
from autopar.capture import trace
from autopar.capture.arguments import bind_arguments
from autopar.capture.symbolic.captured import capture_with_symbols
from autopar.model import planner

MESH = autopar.Mesh(dp=2, tp=2)
f64 = torch.float64


class Net(nn.Module):
    """Takes another way for long sequences, draws random numbers, and merges two dims."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, 8, dtype=f64), nn.Linear(8, 6, dtype=f64), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).flatten(0, 1)
        if self.dropout:
            hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        if x.shape[1] > 5:
            hidden = hidden.relu()
        return (self.down(hidden) / x.shape[1]).square().sum() / x.shape[0]


def inputs(batch: int, length: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, length, 6, dtype=f64)}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done: traces and searches."""
    found: list[str] = []
    run, search = trace.Tracer.run, planner.search

    def traced(self: Any) -> Any:
        found.append("trace")
        return run(self)

    def searched(*args: Any, **options: Any) -> Any:
        found.append("search")
        return search(*args, **options)

    monkeypatch.setattr(trace.Tracer, "run", traced)
    monkeypatch.setattr(planner, "search", searched)
    return found


def said(reports: Any) -> list[str]:
    return [report.notes[0].partition(" ")[0] for report in reports if report.name.endswith("cache")]


def test_calls_of_two_sizes_come_from_the_cache(tmp_path: Path, done: list[str]) -> None:
    """A third size is served by the capture with symbols; one that its condition leaves out is captured."""
    texts: list[list[str]] = []
    for expected in (["trace", "search"], ["trace"]), ([], []):
        model = Net()
        parallel: Any = autopar.parallelize(model, MESH, "search", cache=tmp_path)
        texts.append([])
        for batch, made in zip((8, 3), expected, strict=True):
            done.clear()
            assert difference(parallel, parallel.simulate, model, inputs(batch)) <= TOLERANCE
            assert done == made
            texts[-1].append(str(parallel.program))
        assert "x : f64[s0 s1 6] = input" in texts[-1][-1] and parallel.captures == 2
        done.clear()
        for batch, length in ((17, 4), (2, 5)):
            assert difference(parallel, parallel.simulate, model, inputs(batch, length)) <= TOLERANCE
            assert parallel.captures == 2 and "nothing was traced" in str(parallel.reports)
        assert not done
        # another guard: the sequence is longer than what the capture is for
        assert difference(parallel, parallel.simulate, model, inputs(3, 7)) <= TOLERANCE
        assert done == (["trace"] if expected[0] else []) and parallel.captures == 3
    assert texts[0] == texts[1]


def test_a_hint_is_for_its_own_sizes(tmp_path: Path, done: list[str]) -> None:
    """Two processes capture with symbols at other sizes. Neither reads what the other one has made for its sizes."""
    for batch, word in ((3, "miss:"), (5, "miss:"), (3, "hit:"), (5, "hit:")):
        model = Net()
        parallel: Any = autopar.parallelize(model, MESH, "ddp", dynamic=True, cache=tmp_path)
        assert difference(parallel, parallel.simulate, model, inputs(batch)) <= TOLERANCE
        assert said(parallel.reports) == [word]
        assert parallel.simulate(**inputs(6)).isfinite() and done.count("trace") == (word == "miss:")
        done.clear()


def test_steps_of_two_sizes_come_from_the_cache(tmp_path: Path, done: list[str]) -> None:
    """The first call is traced twice: with twice the rows, its loss is divided by another number."""
    plan: Any = ["search", {"x": ("dp", None, None)}]
    for start in range(2):
        torch.manual_seed(0)
        model = Net()
        alone = copy.deepcopy(model)
        parallel: Any = autopar.parallelize(model, MESH, plan, cache=tmp_path)
        step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=0.1), microbatches=2)
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
        for batch in (8, 4, 8, 6):
            given = inputs(batch)
            optimizer.zero_grad()
            expected = alone(**given)
            expected.backward()
            optimizer.step()
            assert abs(float(step.simulate(given)) - float(expected.detach())) <= TOLERANCE
        assert said(step.reports)[0] == ("hit:" if start else "miss:") and step.captures == 2
        assert done == ([] if start else ["trace", "trace", "search", "trace"])
        done.clear()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def test_a_capture_with_symbols_is_read_back_alike() -> None:
    """Programs, random draws, conditions and fixed lengths."""
    for model, given in ((Net(0.5), inputs(4)), (Net(), inputs(4, 9))):
        made = capture_with_symbols(model, bind_arguments(model, (), given))
        at = made.at(made.validity.values, None)  # type: ignore[arg-type]
        read = symbols_of(symbols_to_json(at), made.captured.guards)
        assert read is not None and read.captured.program == made.captured.program
        assert read.captured.draws == made.captured.draws and read.about == made.about
        assert read.validity.shapes == made.validity.shapes
        assert [g.condition for g in read.validity.guards] == [g.condition for g in made.validity.guards]
        assert {k: g.text for k, g in read.validity.fixed.items()} == {
            k: g.text for k, g in made.validity.fixed.items()
        }
        for length in (4, 9):
            shapes = {"x": (7, length, 6)}
            assert str(read.validity.fits(shapes)) == str(made.validity.fits(shapes))
