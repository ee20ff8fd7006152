"""The bound of a host that computes itself: no schedule has fewer messages, and none is shorter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.scheduling import ByteScheduler, Op, schedule
from autopar.scheduling.bounds import fewest_messages, host_bound
from autopar.scheduling.graph import Graph


@st.composite
def steps(draw: st.DrawFn) -> list[Op]:
    ops: list[Op] = []
    for k in range(draw(st.integers(1, 12))):
        before = draw(st.sets(st.integers(0, k - 1), max_size=2)) if k else set()
        stream, size = draw(st.sampled_from(["compute", "dp", "tp"])), draw(st.sampled_from([0, 1, 64]))
        ops.append(Op(f"op{k}", stream, float(draw(st.integers(0, 4))), tuple(f"op{i}" for i in sorted(before)),
                      bytes=size, kind=draw(st.sampled_from("ab"))))  # fmt: skip
    return ops


@given(steps(), st.sampled_from(["program", "today", "ddp", "p3", "longest-tail", "two-streams", ByteScheduler(8, 64)]),
       st.sampled_from([0.0, 0.5]))  # fmt: skip
def test_no_schedule_is_below_it(ops: list[Op], policy: str | ByteScheduler, interference: float) -> None:
    made = schedule(ops, policy, "direct", startup=0.5, start_seconds=2.0, interference=interference)
    assert made.makespan >= made.bound * (1 - 1e-9) >= host_bound(Graph(ops, 0.5, 2.0)) * (1 - 2e-9)
    assert sum(line.kind == "start" for line in made.lines) >= fewest_messages(Graph(ops))


def test_messages_of_one_path_are_counted_each_and_others_once_for_a_kind() -> None:
    ops = [Op("loss", "compute", 1.0), Op("count", "dp", 0.0)]
    ops += [Op(f"sum{i}", "dp", 0.1, ("loss",), bytes=8) for i in range(3)]
    ops += [Op("norm", "compute", 1.0, ("sum0", "count")), Op("again", "dp", 0.1, ("norm",), bytes=8)]
    ops += [Op("other", "dp", 0.1, ("loss",), bytes=8, kind="max"), Op("more", "tp", 0.1, ("loss",), bytes=8)]
    assert fewest_messages(Graph(ops)) == 5  # count; sum0 and again; other; more
    assert host_bound(Graph(ops, start_seconds=2.0)) == 12
    assert host_bound(Graph(ops)) == 0


def test_a_step_of_few_messages_is_proved_to_be_near_the_best() -> None:
    ops = [Op("loss", "compute", 1.0), *(Op(f"sum{i}", "dp", 0.1, ("loss",), bytes=8) for i in range(3))]
    made = schedule(ops, issue="direct", startup=0.1, start_seconds=10.0)
    assert made.bound == 11
    assert made.ratio < 1.01
