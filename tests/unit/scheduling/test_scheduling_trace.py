"""Check traces of schedules: what a viewer shows is what was simulated."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pytest import approx

from autopar.scheduling import POLICIES, Op, schedule
from autopar.scheduling.trace import simulated_track
from autopar.traces import COLOURS, Slice, Track, save_trace, trace

OPS = [
    Op("first", "compute", 1.0),
    Op("reduce", "dp", 4.0, ("first",), bytes=8),
    Op("other", "compute", 2.0, ("first",)),
    Op("read", "compute", 1.0, ("reduce", "other")),
]


def spans(events: list[dict[str, Any]], category: str) -> list[tuple[str, float, float]]:
    return [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["cat"] == category]


def test_a_wait_that_blocks_is_exposed_and_has_an_arrow_from_its_message(tmp_path: Path) -> None:
    track = simulated_track("simulated", [("forward", schedule(OPS)), ("again", schedule(OPS))])
    save_trace([track], tmp_path / "trace.json", {"bound": 6.0})
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read == trace([track], {"bound": 6.0}) and read["otherData"] == {"bound": 6.0}
    events = read["traceEvents"]
    seconds = 1e6  # Chrome's times are microseconds
    assert spans(events, "compute") == [
        (name, since + begin, length)
        for since in (0, 6 * seconds)
        for name, begin, length in (("first", 0, seconds), ("other", seconds, 2 * seconds), ("read", 5e6, seconds))
    ]
    assert spans(events, "message") == [("reduce", since + seconds, 4 * seconds) for since in (0, 6 * seconds)]
    assert spans(events, "exposed") == [("wait reduce", since + 3e6, 2 * seconds) for since in (0, 6 * seconds)]
    begins, ends = ([e for e in events if e["ph"] == ph] for ph in "sf")
    assert [e["id"] for e in begins] == [e["id"] for e in ends] == [1, 2]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for begin, end, since in zip(begins, ends, (0, 6 * seconds), strict=True):
        assert names[begin["tid"]] == "dp" and since + 1e6 < begin["ts"] < since + 5e6
        assert names[end["tid"]] == "compute" and since + 3e6 < end["ts"] < since + 5e6 and end["bp"] == "e"


@pytest.mark.parametrize("issue", ["enqueue", "direct"])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_schedules(policy: str, issue: str) -> None:
    """Threads do not overlap, and the exposed slices add up to the exposed seconds."""
    draw = random.Random(f"{policy} {issue}")
    for _ in range(20):
        ops: list[Op] = []
        for k in range(draw.randint(1, 20)):
            after = tuple(op.name for op in ops if draw.random() < 0.2)
            stream = draw.choice(["compute", "compute", "dp", "tp"])
            ops.append(Op(f"op{k}", stream, draw.randint(0, 4), after, bytes=8 * (stream != "compute")))
        made = schedule(ops, policy, issue, priorities={"*": 0} if policy == "priorities" else None)
        track = simulated_track("simulated", [("all", made)])
        exposed = sum(slice.end - slice.begin for slice in track.slices if slice.shows == "exposed")
        assert exposed == approx(made.exposed, abs=1e-9)
        for thread in {slice.thread for slice in track.slices}:
            own = sorted((s.begin, s.end) for s in track.slices if s.thread == thread and s.end > s.begin)
            assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(own))


def test_messages_whose_ends_are_not_known_may_overlap() -> None:
    track = Track("rank 0", [Slice("a", "dp", 0.0, 2.0, "under way"), Slice("b", "dp", 1.0, 3.0, "under way")])
    events = [e for e in trace([track])["traceEvents"] if e["ph"] in "be"]
    assert [(e["ph"], e["name"], e["ts"]) for e in events] == [
        ("b", "a", 0), ("e", "a", 2e6), ("b", "b", 1e6), ("e", "b", 3e6)
    ]  # fmt: skip
    assert len({e["id"] for e in events}) == 2 and {e["cat"] for e in events} == {"dp"}
    assert {"module", "compute", "start", "message", "under way", "exposed"} < set(COLOURS)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (schedule(OPS), r"give pairs of a name and a schedule, such as \[\('longest-tail', schedule\)\]"),
        ([schedule(OPS)], r"is no pair of a name and a schedule, such as \('step', schedule\)"),
    ],
)
def test_schedules_without_names(given: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        simulated_track("simulated", given)


def test_what_is_no_track_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a trace shows tracks, as simulated_track makes them, not 1"):
        trace([1])  # type: ignore[list-item]
