"""Profiles of steps: what a trace must be for ui.perfetto.dev, and steps on ranks that are profiled."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import crossing_steps
import pipelined_timelines
import steps
import torch
from equality import relative
from pipelined_steps import MESHES, differences, made
from torch import distributed


def checked(path: Path) -> dict[str, Any]:
    """Read a trace, and check it against the trace event format. Returns its tracks: name → its slices and flows."""
    found = json.loads(path.read_text())
    events = found["traceEvents"]
    tracks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    open_ones: dict[tuple[str, int], dict[str, Any]] = {}
    for event in events:
        assert event["ph"] in "MXbesf" and event["pid"] in tracks
        if event["ph"] == "M":
            continue
        assert (event["pid"], event["tid"]) in threads and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]], "an arrow has one begin and one end"
            flows[event["id"]][event["ph"]] = event
        elif event["ph"] == "b":
            open_ones[event["cat"], event["id"]] = event
        else:
            assert open_ones.pop((event["cat"], event["id"]))["ts"] <= event["ts"]
    assert not open_ones
    for own in slices.values():
        check_nesting(own)
    for ends in flows.values():
        begin, end = ends["s"], ends["f"]
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"]) and end["bp"] == "e"
        assert begin["ts"] <= end["ts"], "an arrow leads forward in time"
        for event in (begin, end):
            own = slices.get((event["pid"], event["tid"]), ())
            event["at"] = innermost(own, event["ts"])
    return {"tracks": tracks, "threads": threads, "slices": slices, "flows": list(flows.values())}


def check_nesting(slices: list[dict[str, Any]]) -> None:
    """Slices of one thread lie in each other or apart, and an outer one stands before its inner ones."""
    opened: list[float] = []
    before = 0
    for slice in slices:
        begin, end = round(slice["ts"] * 1e3), round((slice["ts"] + slice["dur"]) * 1e3)
        assert begin >= before, "slices stand in the order in which they begin"
        before = begin
        while opened and opened[-1] <= begin:
            opened.pop()
        assert not opened or end <= opened[-1], f"{slice['name']} ends behind the slice around it"
        opened.append(end)


def innermost(slices: Any, at: float) -> str:
    """The name of the innermost slice at a time: the one that Perfetto binds an arrow to."""
    around = [s for s in slices if s["ts"] - 1e-3 <= at <= s["ts"] + s["dur"] + 1e-3]
    assert around, "an arrow begins and ends in a slice"
    return min(around, key=lambda s: s["dur"])["name"]


def between(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The arrows of a name that lead from one track to another."""
    return [ends for ends in found["flows"] if ends["s"]["name"] == name and ends["s"]["pid"] != ends["f"]["pid"]]


def profiled(name: str, sizes: dict[str, int], options: dict[str, Any], by_loop: bool, folder: str) -> None:
    """On each rank: steps between others are profiled, with their numbers. The first rank has one trace of all.

    Args:
        by_loop: whether the loop runs the steps, and not ``profile``.
    """
    ours, theirs = (crossing_steps.made(name, sizes, options) for _ in range(2))
    batches = [steps.MODELS[name][1](k) for k in range(4)]
    steps.run(ours, batches[0])
    path = Path(folder, f"{distributed.get_rank()}.json")
    if by_loop:
        following = ours.profile(steps=2, path=path)
        for batch in batches[1:3]:
            assert following.profile is None
            steps.run(ours, batch)
        report = following.profile
    else:
        report = ours.profile(iter(batches[1:3]), steps=2, path=path)
    steps.run(ours, batches[3])
    for batch in batches:
        steps.run(theirs, batch)
    one, other = (crossing_steps.state_of(step) for step in (ours, theirs))
    assert all(torch.equal(value, other[key]) for key, value in one.items()) and one.keys() == other.keys()
    count = distributed.get_world_size()
    assert len(report.ranks) == count and report.steps == 2
    assert path.exists() == (distributed.get_rank() == 0), "one file"
    if path.exists():
        found = checked(path)
        assert [*found["tracks"].values()] == ["computed", *(f"rank {rank}" for rank in range(count))]
        names = {slice["name"] for own in found["slices"].values() for slice in own}
        assert {"step 1", "step 2", "forward", "backward", "update"} <= names
        started = sum(len(run.messages) for runs in report.ranks[0].runs for run in runs)
        alike = len({line.ranks for runs in report.ranks[0].runs for run in runs for line in run.lines} - {()}) == 1
        arrows = between(found, "collective")
        assert arrows and (not alike or len(arrows) == started * (count - 1))
        assert all(ends["s"]["at"].startswith("start ") for ends in arrows)
        assert all(ends["f"]["at"] == ends["s"]["at"].replace("start ", "wait ", 1) for ends in arrows)
        assert any(ends["s"]["name"] == "wait" and ends["s"]["pid"] == 2 for ends in found["flows"])
    assert all(key in report.planned for key in report.real if key[1]), "what ran was computed"
    seconds = sum(sum(cell) for cell in report.real.values())
    lines = [line for runs in report.ranks[0].runs for run in runs for line in run.lines]
    assert seconds > 0 and all(line.path for line in lines if line.text)
    assert "real ms" in str(report) and f"2 steps on {count} ranks" in str(report)


def profiled_stages(mesh: str, policy: str, folder: str) -> None:
    """On each rank: a pipelined step is profiled, with the numbers of a single device."""
    options: dict[str, Any] = {"layers": pipelined_timelines.layers_for(mesh, policy), "clip_norm": 0.5}
    step, alone, batches = made("streams", MESHES[mesh], policy, 3, **options)
    path = Path(folder, f"{distributed.get_rank()}.json")
    report = step.profile(batches(0), steps=2, path=path)
    for _ in range(2):
        alone(**batches(0))
    assert relative(steps.run(step, batches(1)), alone(**batches(1))[0]) <= 1e-9
    assert max(differences(step, alone).values()) <= 1e-9
    schedule, count = step.pipeline.schedule, distributed.get_world_size()
    if path.exists():
        found = checked(path)
        assert len(found["tracks"]) == schedule.ranks + count
        sends = [slot for rank in report.ranks for own in rank.slots for slot in own if slot.kind == "start"]
        peers = sum(
            len(p) for slot in sends for task, p in zip(slot.tasks, slot.peers, strict=True) if task.action == "S"
        )
        arrows = between(found, "message")
        assert len(arrows) == peers > 0, "each message has an arrow"
        assert all("FS" in ends["s"]["at"] or "BS" in ends["s"]["at"] for ends in arrows)
        assert all(ends["f"]["at"].startswith("wait ") for ends in arrows)
        names = {slice["name"] for own in found["slices"].values() for slice in own}
        assert {"step 1", "step 2", "forward", "layers.0"} <= names
    assert ("(other stages)", "") in report.real and ("(other stages)", "") in report.planned
    assert all(a.begin <= a.end for rank in report.ranks for own in rank.slots for a in own)
    pairs = [pair for rank in report.ranks for own in rank.slots for pair in itertools.pairwise(own)]
    assert all(a.end <= b.begin for a, b in pairs)
    step.parallel.close()
