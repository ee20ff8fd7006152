"""Two streams over the same ranks: they share a link, the bound holds, and late collectives move only for a gain."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.scheduling import Line, Op, Part, schedule, simulate
from autopar.scheduling.decide import late_stream, on_late_streams

A, B = Op("a", "dp", 4.0, link="wire"), Op("b", "dp (late)", 1.0, ("m",), link="wire")
M = Op("m", "compute", 1.0)


def lines(*text: str) -> list[Line]:
    return [Line(kind, (Part(name, 0, 0),)) for kind, name in map(str.split, text)]  # type: ignore[arg-type]


def ends(ops: list[Op], text: list[Line], **options: Any) -> dict[str, float]:
    return {span.parts[0].op: span.end for span in simulate(ops, text, **options).spans}


ORDER = lines("start a", "compute m", "start b", "wait b", "wait a")


@pytest.mark.parametrize("issue", ["enqueue", "direct"])
def test_messages_on_one_link_share_it(issue: Any) -> None:
    """a alone until 1; then both at half the pace; b of 1 ends at 3; a, of which 2 are left, at 5."""
    assert ends([A, M, B], ORDER, issue=issue) == {"m": 1.0, "b": 3.0, "a": 5.0}
    apart = [Op("a", "dp", 4.0), M, Op("b", "other", 1.0, ("m",))]
    assert ends(apart, ORDER, issue=issue) == {"m": 1.0, "b": 2.0, "a": 4.0}
    one = [Op("a", "dp", 4.0), M, Op("b", "dp", 1.0, ("m",))]
    assert ends(one, ORDER, issue=issue) == {"m": 1.0, "b": 5.0, "a": 4.0}


def test_three_streams_on_one_link() -> None:
    """1, 2 and 3 seconds from 0: the first ends after 3, the second after 5, the third after 6."""
    ops = [Op(f"c{n}", f"s{n}", float(n), link="wire") for n in (1, 2, 3)]
    text = lines("start c1", "start c2", "start c3", "wait c1", "wait c2", "wait c3")
    assert ends(ops, text) == {"c1": 3.0, "c2": 5.0, "c3": 6.0}


def test_sharing_and_interference() -> None:
    ops = [A, Op("m", "compute", 3.0), Op("b", "late", 1.0, link="wire")]
    text = lines("start a", "start b", "compute m", "wait b", "wait a")
    assert ends(ops, text, interference=1.0) == {"b": 2.0, "a": 5.0, "m": 5.5}


def test_the_bound_counts_a_link_once() -> None:
    ops = [Op("a", "dp", 4.0, link="wire"), Op("b", "late", 4.0, link="wire")]
    made = schedule(ops)
    assert (made.bound, made.makespan) == (8.0, 8.0)
    assert schedule([Op("a", "dp", 4.0), Op("b", "late", 4.0)]).makespan == 4.0


def drawn(seed: int, count: int, link: str) -> list[Op]:
    """Random ops on two streams; ``link``: of both."""
    r, ops = random.Random(seed), list[Op]()
    for k in range(count):
        after = tuple(r.sample([op.name for op in ops], min(len(ops), r.randint(0, 2))))
        stream = r.choice(["compute", "compute", "s", "t"])
        size = 0 if stream == "compute" else r.choice([0, 4096])
        ops.append(Op(f"o{k}", stream, r.randint(0, 8) / 2, after, size, link=link * (stream != "compute")))
    return ops


@given(st.integers(0, 10**6), st.integers(1, 14), st.sampled_from(["enqueue", "direct"]),
       st.sampled_from([0.0, 0.25]), st.sampled_from(["program", "longest-tail", "compute-first"]))  # fmt: skip
def test_no_time_is_below_the_bound(seed: int, count: int, issue: Any, startup: float, policy: str) -> None:
    """It raises where one is. Neither is it below what two links take, nor is the bound below theirs."""
    shared = schedule(drawn(seed, count, "wire"), policy, issue, startup=startup)
    apart = schedule(drawn(seed, count, ""), policy, issue, startup=startup)
    assert shared.bound >= apart.bound and shared.makespan >= apart.bound
    alone = simulate(drawn(seed, count, ""), shared.lines, issue, startup=startup)
    assert shared.makespan >= alone.makespan - 1e-9
    moved = sum(op.seconds for op in drawn(seed, count, "wire") if not op.computes)
    assert startup or shared.makespan >= moved - 1e-9


# -- the policy ----------------------------------------------------------------------------------------------------

GAIN = [  # neither may be cut; in one stream one of them is late, and 7 is the shortest of all orders
    Op("long", "dp", 4.0), Op("m", "compute", 1.0), Op("short", "dp", 1.0, ("m",)),
    Op("reads short", "compute", 2.0, ("short",)), Op("reads long", "compute", 1.0, ("long",)),
]  # fmt: skip


def test_a_gain_is_taken() -> None:
    one, two = schedule(GAIN), schedule(GAIN, "two-streams")
    assert (one.makespan, two.makespan, two.bound, one.bound) == (7.0, 6.0, 6.0, 6.0)
    assert two.late and {span.stream for span in two.spans} == {"compute", "dp", "dp (late)"}
    again = simulate(on_late_streams(GAIN, two.late), two.lines)
    assert again.makespan == two.makespan


@given(st.integers(0, 10**6))
def test_it_is_never_longer_than_the_default(seed: int) -> None:
    ops = drawn(seed, 12, "")
    one, two = schedule(ops), schedule(ops, "two-streams")
    assert two.makespan <= one.makespan and two.bound == pytest.approx(one.bound)
    assert two.policy == "two-streams" and two.late <= {op.name for op in ops if not op.computes}
    assert two.late or two.lines == one.lines


def test_late_streams_have_the_link_of_their_stream() -> None:
    ops = [Op("a", "dp", 1.0), Op("b", "dp", 1.0, link=""), Op("c", "compute", 1.0)]
    moved = on_late_streams(ops, {"b"})
    assert moved[::2] == ops[::2]
    assert (moved[1].stream, moved[1].link) == (late_stream("dp"), "dp") == ("dp (late)", "dp")


@pytest.mark.parametrize(
    ("ops", "error", "said"),
    [
        (lambda: [Op("a", "compute", 1.0, link="wire")], ScheduleError,
         "op 'a' computes, so that it has no link; give link='wire' to collectives"),
        (lambda: [Op("a", "dp", 1.0, link=3)], TypeError, "op 'a': link=3 is no word, such as 'dp'"),
        (lambda: schedule([Op("a", "dp", 1.0, link="x"), Op("b", "dp", 1.0)]), ScheduleError,
         "the ops of the stream 'dp' have the links 'x' and 'dp', the latter in 'b'; a stream has one link"),
        (lambda: schedule([M], "two-streams", priorities={"m": 1}), ScheduleError,
         "the policy 'two-streams' takes no priorities; 'priorities' and 'longest-tail' do"),
    ],
)  # fmt: skip
def test_errors(ops: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        ops()
    assert str(caught.value) == said
