"""Wherever ranks are killed while they save: the folder has a whole checkpoint, of the step before or of this one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import check, empty, same
from killed_saves import REFUSED, SAVED

from autopar import checkpoint

KILLED = (-9, -14, -25)  # SIGKILL, SIGALRM, SIGXFSZ


def answers(folder: Path, jobs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of the ranks of each job; each has a folder of its own."""
    folder.mkdir()
    lines = "".join(json.dumps({"folder": str(folder / f"job{k:03}"), "keep": 2, **job}) + "\n" for k, job in enumerate(jobs))
    script = Path(__file__).with_name("killed_saves.py")
    done = subprocess.run([sys.executable, str(script)], input=lines, capture_output=True, text=True, timeout=200, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == lines.count("\n"), done.stderr
    return found


def step_in(folder: Path) -> int:
    """The step of the newest whole checkpoint; all of it is of that step."""
    path = checkpoint.latest(folder)
    assert path is not None
    state = empty(0, "one process") | {"large": torch.zeros(6, 500)}
    found = checkpoint.load(folder, state)
    large = found.pop("large")
    check(found, found["step"], "one process")
    assert (large == found["step"]).all()
    return found["step"]


def jobs_of(ranks: int, places: list[int]) -> list[dict[str, Any]]:
    """Kills at every place where a rank touches the folder, in the middle of its file, and at random times; of one rank, of all."""
    one = {"ranks": ranks, "keep": 1}
    jobs = [one | {"victim": victim, "place": place} for victim in range(ranks) for place in range(places[victim])]
    jobs += [one | {"victim": None, "place": place} for place in range(0, places[0], 4)]
    jobs += [one | {"victim": ranks - 1, "size": size} for size in (0, 1, 1000, 3000)]
    times = random.Random(ranks)
    return jobs + [one | {"victim": victim, "time": times.uniform(1e-4, 0.03)} for victim in (0, ranks - 1, None) for _ in range(4)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each job, and how its ranks ended."""
    peaceful = [{"ranks": ranks, "keep": 1, "victim": victim} for ranks in (1, 2) for victim in range(ranks)]
    places: dict[int, list[int]] = {1: [0], 2: [0, 0]}
    for job in answers(tmp_path_factory.mktemp("peaceful") / "jobs", peaceful):
        assert job["codes"] == [SAVED] * job["ranks"]
        places[job["ranks"]][job["victim"]] = max(job["places"])
    assert min(places[1][0], places[2][0]) > 15 and places[2][1] >= 1  # the hook sees what a save does
    return answers(tmp_path_factory.mktemp("killed") / "jobs", [job for ranks in places for job in jobs_of(ranks, places[ranks])])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_is_killed_is_whole_or_not_there(ended: list[dict[str, Any]], ranks: int) -> None:
    steps = []
    for job in ended:
        if job["ranks"] != ranks:
            continue
        folder, codes = Path(job["folder"]), job["codes"]
        assert all(code in (SAVED, REFUSED, *KILLED) for code in codes), job
        assert "time" in job or set(codes) & set(KILLED), job
        steps.append(step_in(folder))
        assert steps[-1] == 2 if SAVED in codes else steps[-1] in (1, 2), job
        path = checkpoint.save(folder, {"again": torch.ones(2)}, keep=1)  # and the next save goes well, and clears up
        assert sorted(one.name for one in folder.iterdir()) == [path.name, "latest"]
        same(checkpoint.load(folder, {"again": torch.zeros(2)}), {"again": torch.ones(2)})
    assert {1, 2} <= set(steps)
