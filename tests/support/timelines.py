"""On each rank of real processes: a step is recorded, with the numbers of a step that is not."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import crossing_steps
import steps
import torch
from torch import distributed


def recorded(name: str, sizes: dict[str, int], options: dict[str, Any], folder: str) -> None:
    """Between steps that are not recorded, one is. Its lines and messages are those that were scheduled."""
    ours, theirs = (crossing_steps.made(name, sizes, options) for _ in range(2))
    batches = [steps.MODELS[name][1](k) for k in range(3)]
    steps.run(ours, batches[0])
    made = ours.timeline(**batches[1])
    steps.run(ours, batches[2])
    for batch in batches:
        steps.run(theirs, batch)
    one, other = (crossing_steps.state_of(step) for step in (ours, theirs))
    assert all(torch.equal(value, other[key]) for key, value in one.items()) and one.keys() == other.keys()
    assert len(made.runs) == distributed.get_world_size()
    kinds = Counter(line.kind for _, schedule in made.communication.in_turn() for line in schedule.lines)
    for runs in made.runs:
        lines = [line for run in runs for line in run.lines]
        assert all(a.begin <= a.end <= b.begin for a, b in pairwise(lines))
        started = [line for line in lines if line.kind == "start"]
        assert sum(len(run.messages) for run in runs) == kinds["start"] > 0
        waits = {(line.name, line.stream): line.begin for line in lines if line.kind == "wait"}
        if not options.get("across"):
            assert all(waits[line.name, line.stream] >= line.end for line in started)
        assert all(line.text for line in started)
    path = Path(folder, f"{distributed.get_rank()}.json")
    made.save(path)
    names = {e["args"]["name"] for e in made.trace()["traceEvents"] if e["name"] == "process_name"}
    assert names == {"simulated", *(f"rank {rank}" for rank in range(distributed.get_world_size()))}
    assert path.stat().st_size > 1000 and "simulated" in str(made) and "rank 1" in str(made)
