"""Pictures and traces of simulated pipelines: everything is there once, in its place, and the same each time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.pipeline import POLICIES, build
from autopar.pipeline.picture import LANES, METADATA, draw
from autopar.pipeline.simulate import Simulation, Sizes, Times
from autopar.pipeline.trace import save_trace, trace
from autopar.pipeline.tracks import COMPUTATIONS, tracks

SVG = "{http://www.w3.org/2000/svg}"
CASES = [
    ("zb-h1", 4, 8, None),
    ("interleaved-1f1b", 2, 4, 2),
    ("dualpipe-v", 2, 5, None),
    ("zb-h1", 2, 1, None),
    ("1f1b", 1, 1, None),
]


def simulated(policy: str = "zb-h1", ranks: int = 4, batches: int = 8, chunks: int | None = None) -> Simulation:
    return build(policy, ranks, batches, chunks).simulate(Times(2, 2, 1, 0.3), Sizes(3, 1, 0.5, fixed=7))


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    policy = draw(st.sampled_from(sorted(POLICIES)))
    number = st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.3])
    try:
        schedule = build(policy, draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    except ScheduleError:  # the policy has none of this size
        schedule = build("zb-v", 2, 3)
    return schedule.simulate(
        Times(*(draw(number) for _ in range(4))),
        Sizes(2, draw(st.sampled_from([None, 0.7])), draw(number), draw(number)),
    )


# -- tracks ------------------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@settings(deadline=None, max_examples=60)
@given(simulations())
def test_the_highest_of_a_track_is_the_peak(simulation: Simulation) -> None:
    for rank, track in enumerate(tracks(simulation)):
        assert max(track.total) + track.fixed == pytest.approx(simulation.peak[rank])
        assert list(track.times) == sorted(track.times) and track.times[0] == 0.0
        assert {len(own) for own in track.bytes.values()} == {len(track.times)}
        assert min(min(own) for own in track.bytes.values()) >= -1e-9
        assert sum(map(len, track.computed.values())) == len(simulation.computed[rank])


def test_memory_is_taken_and_given_back_when_it_happens() -> None:
    """Rank 1 of two, one micro-batch: it receives at 0, computes from 2.3 to 6.3, then the weights; by hand."""
    track = tracks(simulated("zb-h1", 2, 1))[1]
    assert track.fixed == 7.0
    assert list(
        zip(track.times, track.bytes["activations"], track.bytes["sends"], track.bytes["receives"], strict=True)
    ) == [
        (0.0, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.5),
        (2.3, 3.0, 0.0, 0.5),
        (4.3, 3.0, 0.0, 0.0),
        (4.3, 3.0, 0.5, 0.0),
        (6.3, 1.0, 0.5, 0.0),
        (7.3, 0.0, 0.5, 0.0),
    ]


def test_send_buffers_are_given_back_when_the_slot_has_waited() -> None:
    """Rank 0 of two waits for the gradient from 2 to 6.6, which tells that its message has arrived."""
    track = tracks(simulated("zb-h1", 2, 1))[0]
    given_back = [
        time
        for time, before, after in zip(track.times[1:], track.bytes["sends"], track.bytes["sends"][1:], strict=False)
        if after < before
    ]
    assert given_back == [pytest.approx(6.6)]


# -- pictures ----------------------------------------------------------------------------------------------------------


def picture(simulation: Simulation, folder: Path) -> ElementTree.Element:
    draw(simulation, folder / "picture.svg")
    return ElementTree.parse(folder / "picture.svg").getroot()


def boxes(root: ElementTree.Element, name: str) -> int:
    """Closed shapes of a group; 0 if it is not there."""
    return sum(
        path.get("d", "").count("z")
        for group in root.iter(f"{SVG}g")
        if group.get("id") == name
        for path in group.iter(f"{SVG}path")
    )


@pytest.mark.simulated
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_picture_has_a_box_for_each_computation_and_two_for_each_message(
    case: tuple[str, int, int, int | None], tmp_path: Path
) -> None:
    simulation = simulated(*case)
    root = picture(simulation, tmp_path)
    for name in COMPUTATIONS:
        assert boxes(root, name) == sum(len(track.computed[name]) for track in tracks(simulation)), name
    assert sum(boxes(root, name) for name in COMPUTATIONS) == sum(map(len, simulation.computed)) > 0
    for of, name in (("F", "forward message"), ("B", "backward message")):
        assert boxes(root, name) == 2 * sum(span.op.of == of for span in simulation.sent)
    texts = Counter(text.text for text in root.iter(f"{SVG}text"))
    assert all(texts[f"rank {rank}"] == 1 for rank in range(case[1]))
    assert all(
        any(text and text.startswith(f"peak {peak:.4g} ({7 * simulation.schedule.chunks} fixed)") for text in texts)
        for peak in simulation.peak
    )
    assert any(text and text.startswith(f"{case[0]}, ") for text in texts)


@pytest.mark.simulated
def test_each_computation_bears_its_micro_batch(tmp_path: Path) -> None:
    root = picture(simulated(), tmp_path)
    small = [
        text.text for text in root.iter(f"{SVG}text") if text.get("x") and "anchor: middle" in text.get("style", "")
    ]
    # Four ranks with three passes each; the axis has a 0 of its own.
    assert {number: small.count(number) for number in "01234567"} == {"0": 13, **dict.fromkeys("1234567", 12)}


@pytest.mark.simulated
def test_arrows_are_drawn_where_there_are_few(tmp_path: Path) -> None:
    def arrows(batches: int) -> int:
        root = picture(simulated("1f1b", 4, batches), tmp_path)
        return sum(len(list(g.iter(f"{SVG}path"))) for g in root.iter(f"{SVG}g") if g.get("id", "").endswith(" arrows"))

    assert (arrows(4), arrows(32)) == (24, 0)


@pytest.mark.long
def test_a_picture_is_the_same_each_time_and_changes_no_setting(tmp_path: Path) -> None:
    simulation = simulated()
    for suffix in METADATA:
        before = dict(matplotlib.rcParams)
        draw(simulation, tmp_path / f"first{suffix}")
        with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
            draw(simulation, str(tmp_path / f"second{suffix}"))
        assert dict(matplotlib.rcParams) == before
        assert (tmp_path / f"first{suffix}").read_bytes() == (tmp_path / f"second{suffix}").read_bytes(), suffix
    assert (tmp_path / "first.svg").stat().st_size < 200_000
    assert "dc:date" not in (tmp_path / "first.svg").read_text(encoding="utf-8")
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "first.pdf"
    ).read_bytes().startswith(b"%PDF")


def test_lanes_lie_under_one_another() -> None:
    edges = [edge for lane in LANES.values() for edge in lane]
    assert edges == sorted(edges) and edges[0] >= 0 and edges[-1] <= 1


def test_what_takes_no_time_and_no_memory_is_drawn(tmp_path: Path) -> None:
    for ranks in (1, 2):
        simulation = build("1f1b", ranks, 1).simulate(Times(0, 0, 0), Sizes(0))
        assert simulation.makespan == 0.0 == max(simulation.peak)
        root = picture(simulation, tmp_path)
        instants = [e for e in trace(simulation)["traceEvents"] if e["ph"] == "X" and e["dur"] == 0]
        computed = sum(e.get("cat") != "message" for e in instants)
        assert sum(boxes(root, name) for name in COMPUTATIONS) == computed == 2 * ranks


def test_what_is_no_simulation_or_no_picture_is_refused(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 2)
    for refused in (
        lambda: draw(schedule, tmp_path / "a.svg"),
        lambda: trace(schedule),
        lambda: save_trace(schedule, tmp_path / "a.json"),
    ):
        with pytest.raises(
            TypeError, match=r"is a PipelineSchedule; give a Simulation, as schedule\.simulate\(\) makes it"
        ):
            refused()
    for path in ("a.gif", "a"):
        with pytest.raises(ValueError, match=rf"'{path}' ends in '.*'; a picture is written as \.svg, \.png, \.pdf"):
            draw(simulated(), path)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'autopar\[picture\]'"):
        draw(simulated(), tmp_path / "a.svg")


def test_pyplot_is_not_imported(tmp_path: Path) -> None:
    """It would choose a window system."""
    code = (
        "import sys; from autopar.pipeline import build; from autopar.pipeline.picture import draw; assert "
        "'matplotlib' not in sys.modules;"
        f"draw(build('1f1b', 2, 2).simulate(), {str(tmp_path / 'a.png')!r}); assert 'matplotlib.pyplot' not in "
        f"sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- traces ------------------------------------------------------------------------------------------------------------


def nanoseconds(event: dict, key: str) -> int:
    return round(event[key] * 1000)


def threads_of(events: list[dict]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


@settings(deadline=None, max_examples=40)
@given(simulations())
def test_slices_of_a_thread_do_not_overlap(simulation: Simulation) -> None:
    events = trace(simulation)["traceEvents"]
    threads, slices = threads_of(events), defaultdict(list)
    assert len({number for _, number in threads}) == len(threads)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((nanoseconds(event, "ts"), nanoseconds(event, "dur")))
    assert set(slices) <= set(threads)
    for thread, own in slices.items():
        own.sort()
        assert all(duration >= ("sends" in threads[thread] or "receives" in threads[thread]) for _, duration in own)
        assert all(begin + duration <= after for (begin, duration), (after, _) in pairwise(own))
    assert sum(map(len, slices.values())) == sum(map(len, simulation.computed)) + 2 * len(simulation.sent)


@settings(deadline=None, max_examples=40)
@given(simulations())
def test_each_message_is_an_arrow_from_its_send_to_its_receive(simulation: Simulation) -> None:
    events = trace(simulation)["traceEvents"]
    threads = threads_of(events)
    ends = {ph: {e["id"]: e for e in events if e["ph"] == ph} for ph in "sf"}
    assert (
        len(ends["s"])
        == len(ends["f"])
        == sum(e["ph"] == "s" for e in events)
        == sum(e["ph"] == "f" for e in events)
        == len(simulation.sent)
    )
    assert set(ends["s"]) == set(ends["f"])
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)

    def around(end: dict) -> list[dict]:
        at = nanoseconds(end, "ts")
        return [
            e
            for e in slices[end["pid"], end["tid"]]
            if nanoseconds(e, "ts") <= at <= nanoseconds(e, "ts") + nanoseconds(e, "dur")
        ]

    for number, span in enumerate(sorted(simulation.sent, key=lambda span: span.link), 1):
        start, finish = ends["s"][number], ends["f"][number]
        sender, receiver = span.stream
        assert (start["pid"], finish["pid"], finish["bp"]) == (sender + 1, receiver + 1, "e")
        assert threads[start["pid"], start["tid"]] == f"sends to rank {receiver}"
        assert threads[finish["pid"], finish["tid"]] == f"receives from rank {sender}"
        assert start["ts"] <= finish["ts"]
        task = span.op
        assert (f"{task.of}S{task.batch:02d}", task.stage, task.peer) in [
            (e["name"], e["args"]["stage"], e["args"]["peer"]) for e in around(start)
        ]
        assert (f"{task.of}R{task.batch:02d}", task.peer, task.stage) in [
            (e["name"], e["args"]["stage"], e["args"]["peer"]) for e in around(finish)
        ]
        drawn = next(e for e in around(start) if e["name"] == str(task) and e["args"]["stage"] == task.stage)
        assert nanoseconds(drawn, "dur") >= max(1, round((span.end - span.start) * 1e6) - 1), (
            "it can be seen and bound to"
        )
        assert ("takes no time" in drawn["args"]) == (span.end == span.start)
        # Inside of one slice, its end left out: Perfetto binds to that one and to no other.
        assert [
            sum(nanoseconds(end, "ts") < nanoseconds(e, "ts") + nanoseconds(e, "dur") for e in around(end))
            for end in (start, finish)
        ] == [1, 1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_counters_rise_to_the_peak_and_ranks_are_named(case: tuple[str, int, int, int | None]) -> None:
    simulation = simulated(*case)
    events = trace(simulation)["traceEvents"]
    for rank, peak in enumerate(simulation.peak):
        counters = [e for e in events if e["ph"] == "C" and e["pid"] == rank + 1]
        assert max(sum(e["args"].values()) for e in counters) == pytest.approx(peak)
        assert all(set(e["args"]) == {"activations", "sends", "receives", "fixed"} for e in counters)
        names = {
            e["name"]: e["args"]
            for e in events
            if e["ph"] == "M" and e["pid"] == rank + 1 and e["name"].startswith("process")
        }
        assert names["process_name"] == {"name": f"rank {rank}"} and names["process_sort_index"] == {"sort_index": rank}
        assert "compute" in [name for (pid, _), name in threads_of(events).items() if pid == rank + 1]


@pytest.mark.parametrize(("times", "longest"), [(Times(2, 2, 1, 0), 45_000), (Times(0, 0, 0, 0), 1000)])
def test_messages_that_take_no_time_can_be_seen(times: Times, longest: int) -> None:
    """A thousandth of the makespan, less where the next message begins sooner; those that begin at once come one after
    the other."""
    simulation = build("1f1b", 2, 8).simulate(times)
    slices = defaultdict(list)
    for event in trace(simulation)["traceEvents"]:
        if event.get("cat") == "message" and event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((nanoseconds(event, "ts"), nanoseconds(event, "dur")))
    assert len(slices) == 4 and {len(own) for own in slices.values()} == {8}
    for own in slices.values():
        assert all(0 < duration <= longest for _, duration in own) and own[-1][1] == longest
        assert all(begin + duration <= after for (begin, duration), (after, _) in pairwise(own))


def test_a_slice_tells_its_pass_and_its_time_in_microseconds() -> None:
    events = trace(simulated("zb-h1", 2, 1))["traceEvents"]
    assert [
        (e["pid"], e["name"], e["ts"], e["dur"], e["args"]["pass"], e["args"]["stage"])
        for e in events
        if e["ph"] == "X" and "peer" not in e["args"]
    ] == [
        (1, "FW00", 0, 2000, "forward", 0),
        (1, "BW00", 6600, 2000, "input gradient", 0),
        (1, "WW00", 8600, 1000, "weight gradient", 0),
        (2, "FW00", 2300, 2000, "forward", 1),
        (2, "BW00", 4300, 2000, "input gradient", 1),
        (2, "WW00", 6300, 1000, "weight gradient", 1),
    ]


def test_a_trace_is_json_and_the_same_each_time(tmp_path: Path) -> None:
    simulation = simulated()
    for name in ("first.json", "second.json"):
        save_trace(simulation, tmp_path / name)
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads((tmp_path / "first.json").read_text(encoding="utf-8"), parse_constant=refuse) == trace(simulation)
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_trace(replace(simulation, exposed=(float("nan"),) * 4), tmp_path / "third.json")
    assert not (tmp_path / "third.json").exists()
