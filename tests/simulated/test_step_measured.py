"""``step.measure``: each distinct call of a step is timed once, beside nothing that changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import steps
import torch

import autopar
from autopar import Mesh
from autopar.costs.calls import calls_of
from autopar.costs.durations import durations
from autopar.errors import ProfileError
from autopar.ir.value_names import sums_in
from autopar.runtime.measuring import measure
from autopar.runtime.measuring.clock import Clock, Effort
from autopar.step.train_step import TrainStep

SHORT = Effort(warm=0, seconds=0.0, least=1, most=1)


class Counting(Clock):
    """Runs each call once, and says that it took a microsecond more than the call before."""

    def median(self, call: Callable[[], object]) -> float:
        call()
        counted.append(call)
        return len(counted) * 1e-6


counted: list[Any] = []


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    counted.clear()
    monkeypatch.setattr(measure, "Clock", Counting)


def captured(name: str = "mlp", mesh: Mesh | None = None, **options: Any) -> TrainStep:
    make, batch, plan = steps.MODELS[name]
    torch.manual_seed(0)
    parallel = autopar.parallelize(make(layers=1), mesh or Mesh(dp=2, tp=2), plan)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-3), **options)
    step.capture(batch(0))
    return step


def explicit(step: TrainStep) -> dict[str, autopar.Program]:
    """All explicit programs of a step, the merged ones too."""
    return {name: placed.program for name, placed in step._current().placed.items()}


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "zero": 1, "clip_norm": 1.0}], ids=["plain", "zero"])
def test_each_distinct_call_is_timed_once(options: dict[str, Any]) -> None:
    step = captured(**options)
    found = step.measure(effort=SHORT)
    texts = {text for program in explicit(step).values() for _, text in calls_of(program)}
    assert set(found.rows) == texts
    timed = [row for row in found.rows.values() if not row.why]
    assert len(counted) == len(timed) + 1, "and the smallest op"
    assert len({row.seconds for row in timed}) == len(timed)
    untimed = [row for row in found.rows.values() if row.why]
    assert untimed and {row.kind for row in untimed} == {"exchange"}
    assert all(row.seconds == row.price and 0 < row.startup <= row.seconds for row in untimed)


def test_calls_are_counted_as_often_as_a_step_runs_them() -> None:
    step = captured(microbatches=3)
    found, programs = step.measure(effort=SHORT), step.program.programs
    runs = sum((3 if name == "micro" else 1) * len(list(calls_of(program))) for name, program in programs.items())
    first_sums = len(sums_in(step.program.micro))  # the first gradients take their place
    assert sum(sum(row.times.values()) for row in found.rows.values()) == runs - first_sums
    assert list(found.by_phase) == ["forward", "backward", "update"]


def test_durations_of_each_program_of_the_step() -> None:
    step = captured(zero=1)
    found = step.measure(effort=SHORT)
    for name, program in explicit(step).items():
        seconds = durations(program, found).seconds
        assert seconds.keys() == {node.name for node in program.nodes if node.op == "call_function"}, name
    last = explicit(step)["last"]
    free = durations(last, found, zeros=sums_in(last)).seconds
    assert sum(free.values()) < sum(durations(last, found).seconds.values())


def test_a_profile_of_another_step_is_refused() -> None:
    found = captured(mesh=Mesh(dp=2, tp=2)).measure(effort=SHORT)
    other = captured(mesh=Mesh(dp=2, tp=2), clip_norm=1.0)
    with pytest.raises(ProfileError, match=r"was made of another program: \d+ of \d+ distinct calls have no"):
        durations(other.program.update, found)
    with pytest.raises(ProfileError, match=r"that is on the mesh \(dp=2 tp=2\), and this one on \(dp=4 tp=1\)"):
        durations(captured(mesh=Mesh(dp=4, tp=1)).program.micro, found)


def test_another_capture_of_the_same_step_takes_the_profile() -> None:
    found = captured(zero=1).measure(effort=SHORT)
    again = captured(zero=1)
    assert durations(again.program.micro, found).seconds


def test_nothing_changes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch's random numbers either, if an op draws some."""
    step = captured()
    monkeypatch.setattr(measure, "ready_compute", lambda *_: lambda: torch.rand(()))
    weights = copy.deepcopy(dict(step.parallel.named_parameters()))
    program, random = str(step.program), torch.random.get_rng_state()
    step.measure(effort=SHORT).save(tmp_path / "step.json")
    assert str(step.program) == program and torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(value, weights[name]) for name, value in step.parallel.named_parameters())
    assert step.steps == 0


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "resnet"])
@pytest.mark.long
def test_every_op_of_a_model_can_be_timed(name: str) -> None:
    step = captured(name)
    found = step.measure(effort=SHORT)
    assert {row.why for row in found.rows.values()} <= {"", measure.ALONE}


def test_an_op_that_raises_has_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: Any, node: Any, operands: Any) -> Any:
        if "mm" in str(node.target):
            raise IndexError("index 7 is out of range\nand more")
        return lambda: None

    monkeypatch.setattr(measure, "ready_compute", broken)
    found = captured().measure(effort=SHORT)
    broken_rows = [row for row in found.rows.values() if row.why and row.kind == "op"]
    assert broken_rows and all(row.seconds == row.price > 0 for row in broken_rows)
    assert {row.why for row in broken_rows} == {"on random operands it raises IndexError: index 7 is out of range"}
    assert "distinct calls have their prices: on random operands it raises IndexError" in str(found)


def test_prices_are_those_of_the_machine() -> None:
    step = captured()
    found = step.measure(effort=SHORT, machine="NVIDIA H100 80GB HBM3")
    prices = durations(step.program.micro, "NVIDIA H100 80GB HBM3").seconds
    for node, text in calls_of(step.program.micro):
        assert found.rows[text].price == prices[node.name]


def test_what_is_refused() -> None:
    step = captured()
    with pytest.raises(ValueError, match="one process has none; start several with torchrun, or leave"):
        step.measure(interference=True)
    with pytest.raises(ValueError, match="there is no machine 'cpus'; did you mean 'cpu'"):
        step.measure(machine="cpus")
    make, _, plan = steps.MODELS["mlp"]
    parallel = autopar.parallelize(make(layers=1), Mesh(dp=2, tp=2), plan)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1e-3))
    with pytest.raises(RuntimeError, match="nothing has been captured yet"):
        step.measure()
