"""Profiles of steps in one process: spans of torch's profiler, and the trace of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import step_profiles
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar import Mesh


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def made(sizes: dict[str, int]) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    parallel = autopar.parallelize(Net(), Mesh(sizes))
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2)
    return parallel, step, {"x": torch.randn(4, 8, dtype=torch.float64)}


def spans(found: Any) -> set[tuple[str, ...]]:
    """The paths of all events, from the outermost, without the ops of torch."""
    paths = set()
    for event in found.events():
        path, at = [], event
        while at is not None:
            path.append(at.name)
            at = at.cpu_parent
        if not event.name.startswith("aten::"):
            paths.add(tuple(reversed(path)))
    return paths


def test_spans_of_a_step_and_a_call() -> None:
    """Spans lie in each other as modules do, and the numbers are those of a step without a profiler."""
    parallel, step, batch = made({"dp": 1})
    _, other, _ = made({"dp": 1})
    assert torch.equal(step(batch), other(batch))
    parallel(**batch)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss = step(batch)
        parallel(**batch).backward()
    assert torch.equal(loss, other(batch))
    assert torch.equal(step(batch), other(batch))
    paths = spans(found)
    for phase in ("forward", "backward"):
        for batch_words in ("micro-batch 1 of 2", "micro-batch 2 of 2"):
            for layer in ("layers.0", "layers.1"):
                assert ("step 2", batch_words, phase, layer, "up") in paths
    assert ("step 2", "micro-batch 2 of 2", "update") in paths
    assert ("call Net", "_ProcessCall", "forward", "layers.1", "down") in paths, (
        "_ProcessCall is torch's span of an autograd function"
    )
    assert any(path[-3:] == ("backward", "layers.0", "up") and path[0] != "step 2" for path in paths)


def test_the_trace_of_a_process_that_is_alone(tmp_path: Path) -> None:
    _, step, batch = made({"dp": 1})
    report = step.profile(batch, steps=2, path=tmp_path / "trace.json")
    assert step.steps == 2 and "2 steps on 1 rank;" in str(report)
    found = step_profiles.checked(tmp_path / "trace.json")
    assert [*found["tracks"].values()] == ["computed", "rank 0"]
    assert ("", "update") in report.real and ("", "update") in report.planned, "one line updates several modules"
    assert ("layers.1", "backward") in report.real and ("layers.1", "backward") in report.planned


def test_the_loop_runs_the_steps(tmp_path: Path) -> None:
    """The step returns what it always returns. A second recording waits for the first, and a failed step ends it."""
    _, step, batch = made({"dp": 1})
    _, other, _ = made({"dp": 1})
    path = tmp_path / "trace.json"
    following = step.profile(steps=2, path=path)
    assert torch.equal(step(batch), other(batch)) and path.read_text() == ""
    assert str(following) == f"1 of 2 steps have run; {path} is written after the last"
    with pytest.raises(RuntimeError, match=r"steps are recorded already: 1 of 2 steps have run; .*; run them first"):
        step.profile(batch)
    assert torch.equal(step(batch), other(batch))
    assert "2 steps on 1 rank;" in str(following) and following.profile is not None
    assert [*step_profiles.checked(path)["tracks"].values()] == ["computed", "rank 0"]
    assert torch.equal(step(batch), other(batch)), "no step is recorded any more"
    unfinished = step.profile(steps=1, path=path)
    with pytest.raises(TypeError):
        step(no_argument=batch)
    step(batch)
    assert unfinished.profile is None


def test_the_loop_simulates_the_steps(tmp_path: Path) -> None:
    _, step, batch = made({"dp": 2, "tp": 2})
    with pytest.raises(RuntimeError, match="capture"):
        step.profile(path=tmp_path / "trace.json")
    step.simulate(batch)
    following = step.profile(path=tmp_path / "trace.json")
    assert "simulated ranks have no times" in str(following) and not following.profile.ranks
    step.simulate(batch)


def test_simulated_ranks_have_no_times(tmp_path: Path) -> None:
    """The trace has the computed step alone, and says why."""
    parallel, step, batch = made({"dp": 2, "tp": 2})
    before = [p.clone() for p in parallel.parameters()]
    report = step.profile(batch, path=tmp_path / "trace.json")
    assert all(torch.equal(a, b) for a, b in zip(before, parallel.parameters(), strict=True))
    assert "simulated ranks have no times of their own: no step ran; start real ones with torchrun" in str(report)
    found = step_profiles.checked(tmp_path / "trace.json")
    assert [*found["tracks"].values()] == ["computed"] and not report.ranks and not report.real
    assert sum(exposed for _, exposed in report.planned.values()) == pytest.approx(step.communication.exposed)
    assert sum(sum(cell) for cell in report.planned.values()) == pytest.approx(step.communication.makespan, rel=0.5)


@pytest.mark.parametrize("steps", [0, True, 1.5])
def test_steps_that_are_no_number(steps: Any) -> None:
    _, step, batch = made({"dp": 1})
    with pytest.raises(ValueError, match="is not a number of steps above 0"):
        step.profile(batch, steps=steps)


def test_too_few_batches(tmp_path: Path) -> None:
    _, step, batch = made({"dp": 1})
    with pytest.raises(ValueError, match="ended after 2 of steps=3; give it more batches"):
        step.profile(iter([batch, batch]), path=tmp_path / "trace.json")
    assert step.steps == 0


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """It is found before a step runs."""
    _, step, batch = made({"dp": 1})
    with pytest.raises(OSError, match="no such folder"):
        step.profile(batch, path=tmp_path / "no such folder" / "trace.json")
    assert step.steps == 0
