"""``step.measure`` with stages: the calls of all stages, and by them the durations of passes and of the simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipelined_steps import MESHES, made

from autopar.costs.calls import calls_of
from autopar.costs.durations import durations
from autopar.costs.profile import Profile
from autopar.errors import ProfileError
from autopar.ir.nodes import record_of
from autopar.pipeline import POLICIES
from autopar.runtime.measuring import measure
from autopar.runtime.measuring.clock import Clock, Effort
from autopar.step.pipelined.reports.times import crossing_bytes, message_price, message_text

SHORT = Effort(warm=0, seconds=0.0, least=1, most=1)
SECONDS = 1e-3


class Counting(Clock):
    """Runs each call once, and says that it took a millisecond more than the call before."""

    def median(self, call: Callable[[], object]) -> float:
        call()
        counted.append(call)
        return len(counted) * SECONDS


counted: list[Any] = []


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    counted.clear()
    monkeypatch.setattr(measure, "Clock", Counting)


def captured(name: str, mesh: str, policy: str, **options: Any) -> Any:
    layers = max(4, MESHES[mesh]["pp"] * POLICIES[policy].default)
    low = {"prepare": lambda model: model.float()} if "amp" in options else {}
    step, _, batches = made(name, MESHES[mesh], policy, 3, layers=layers, **options, **low)
    batch = batches(0)
    step.capture(**({name: t.float() if t.is_floating_point() else t for name, t in batch.items()} if low else batch))
    return step


@pytest.mark.parametrize(("name", "mesh", "policy", "options"), [
    ("layers", "pp2 tp2", "1f1b", {}), ("shared", "pp2 dp2", "zb-h1", {"zero": 1, "clip_norm": 1.0}),
    ("layers", "pp2 dp2", "1f1b", {"amp": "bf16-O2"}), ("layers", "pp3", "zb-v", {}),
])  # fmt: skip
def test_each_distinct_call_of_all_stages_is_timed_once(
    name: str, mesh: str, policy: str, options: dict[str, Any]
) -> None:
    step = captured(name, mesh, policy, **options)
    found = step.measure(effort=SHORT)
    programs = [stage_program for stage in step.program.stages for stage_program in stage.programs.values()]
    texts = {text for program in programs for _, text in calls_of(program)}
    messages = found.rows.keys() - texts
    assert texts <= found.rows.keys() and all(text.startswith("messages of ") for text in messages)
    timed = [row for row in found.rows.values() if not row.why]
    assert len(counted) == len(timed) + 1, "and the smallest op"
    untimed = [row for row in found.rows.values() if row.why]
    assert {row.kind for row in untimed} == {"exchange"} and {row.why for row in untimed} == {measure.ALONE}
    assert messages <= {row.call for row in untimed}
    assert all(row.seconds == row.price > 0 for row in untimed)


def test_calls_are_counted_over_all_stages() -> None:
    step = captured("layers", "pp2 tp2", "1f1b")
    found, stages = step.measure(effort=SHORT), range(2)
    assert {"messages of 64 bytes from stage 0 to stage 1", "messages of 64 bytes from stage 1 to stage 0"} == {
        call for call in found.rows if call.startswith("messages")
    }
    assert [found.rows[f"messages of 64 bytes from stage {k} to stage {1 - k}"].times for k in stages] == [
        {"forward": 3},
        {"backward": 3},
    ]
    of_stages = [[text for _, text in calls_of(step._current().micro.stages[k].program)] for k in stages]
    both = {text for text in of_stages[0] if text in of_stages[1] and not text.startswith("add.")}
    assert both
    for text in both:
        assert sum(found.rows[text].times.values()) == 3 * (of_stages[0].count(text) + of_stages[1].count(text)), text


def test_a_step_with_the_profile_has_measured_times(tmp_path: Path) -> None:
    """Without collectives a pass takes the sum of its calls; so do its schedules, and the simulation."""
    plain = captured("layers", "pp3", "zb-h1")
    found = plain.measure(effort=SHORT)
    found.save(tmp_path / "step.json")
    step = captured("layers", "pp3", "zb-h1", profile=tmp_path / "step.json")
    assert str(step.program) == str(plain.program)
    times, priced = step.pipeline.times, plain.pipeline.times
    for k in range(3):
        local = step.program.stages[k]["micro"]
        sums: dict[str, float] = {}
        seconds = durations(local, found).seconds
        for node, _ in calls_of(local):
            phase = record_of(node).phase
            sums[phase] = sums.get(phase, 0.0) + seconds[node.name]
        assert times.forward[k] == pytest.approx(sums["forward"])
        assert times.backward[k] == pytest.approx(sums.get("backward", 0.0))
        assert times.weight[k] == pytest.approx(sums["weight_gradients"])
    assert step.pipeline.simulate().makespan > 3 * SECONDS > plain.pipeline.simulate().makespan
    assert times.transfer == priced.transfer, "alone, messages have prices"
    assert any("measured on cpu" in line for line in str(step.communication).splitlines())


def test_messages_take_their_measured_seconds() -> None:
    plain = captured("layers", "pp3", "1f1b")
    found = plain.measure(effort=SHORT)
    micro, _ = plain._current().pair
    for boundary, phase, seconds in ((0, "forward", 0.25), (0, "backward", 0.5), (1, "forward", 2.0)):
        sends = crossing_bytes(micro, boundary, phase)
        text = message_text(boundary, phase, sends)
        assert found.rows[text].price == message_price(sends, found.machine) == found.rows[text].seconds
        object.__setattr__(found.rows[text], "seconds", seconds)
    step = captured("layers", "pp3", "1f1b", profile=found)
    assert list(step.pipeline.times.transfer) == [0.5, 2.0]
    taken = sorted({round(span.end - span.start, 9) for span in step.pipeline.simulate().sent})
    assert taken == [0.5, 2.0]


def test_what_is_refused() -> None:
    step = captured("layers", "pp2 tp2", "1f1b")
    found: Profile = step.measure(effort=SHORT)
    with pytest.raises(ProfileError, match=r"was made of another program: \d+ of \d+ distinct calls have no"):
        captured("layers", "pp2 tp2", "1f1b", profile=found, clip_norm=1.0)
    with pytest.raises(ProfileError, match=r"that is on the mesh \(tp=2\), and this one on \(\)"):
        captured("layers", "pp4", "1f1b", profile=found)
    with pytest.raises(ValueError, match="one process has none; start several with torchrun, or leave"):
        step.measure(interference=True)
    step, _, _ = made("layers", {"pp": 2}, "1f1b", 2)
    with pytest.raises(RuntimeError, match="nothing has been captured yet"):
        step.measure()
