"""Wherever a save ends, the folder has a whole checkpoint, of the step before or of this one, and the next save goes
well.

That is tried at each file operation by ``interrupted_saves``, in this process and on two ranks; and in a few places
with ranks that are killed indeed, by ``killed_saves``: there the rest of a rank's work, and the other rank, are as in a
job.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import interrupted_saves
import pytest
import torch
from checkpoints import check, empty, same
from interrupted_saves import KILLS, Disk, interrupted
from killed_saves import REFUSED, SAVED
from processes import ranks

from autopar import checkpoint

KILLED = (-9, -25)  # SIGKILL, SIGXFSZ


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    interrupted_saves.prepared(folder)
    return folder


def operations(source: Path, folder: Path) -> int:
    """How many a save has."""
    counting = Disk()
    assert interrupted(source, folder, counting) == (2, "none: ")
    assert counting.count > 20
    return counting.count


@pytest.mark.parametrize("how", KILLS)
@pytest.mark.parametrize("power", [True, False], ids=["killed", "power cut"])
def test_a_save_that_ends_at_any_operation(source: Path, tmp_path: Path, how: str, power: bool) -> None:
    steps = []
    for at in range(operations(source, tmp_path / "copy")):
        step, error = interrupted(source, tmp_path / "copy", Disk(at, how, power))
        steps.append(step)
        assert error != "none: ", at
    assert steps == sorted(steps) and set(steps) == {1, 2}


def test_a_save_onto_a_full_disk_at_any_operation(source: Path, tmp_path: Path) -> None:
    """It is an error that says so, or a warning where the new one is whole; and nothing of it stays."""
    before, steps = sorted(one.name for one in source.iterdir()), []
    for at in range(operations(source, tmp_path / "copy")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step, error = interrupted(source, tmp_path / "copy", Disk(at, "full"))
        steps.append(step)
        warned = [str(one.message) for one in caught if "torch.distributed is disabled" not in str(one.message)]
        if step == 1 or not warned:
            assert (
                error.startswith("CheckpointError: no checkpoint was written to")
                and "[Errno 28] No space left on device" in error
            )
            assert error.endswith("; make room, or name another folder, and save again"), error
        else:
            assert (
                error == "none: "
                and "is complete, but old checkpoints could not be removed: [Errno 28] No space left on device"
                in warned[0]
            )
    assert steps == sorted(steps) and set(steps) == {1, 2}
    assert sorted(one.name for one in source.iterdir()) == before


def test_a_rank_that_ends_at_any_operation(tmp_path: Path) -> None:
    every = ranks(2).run(interrupted_saves.on_ranks, str(tmp_path))
    assert every[0] == every[1] and set(every[0]) == {f"{victim} {how}" for victim in (0, 1) for how in KILLS[1:]}
    for name, steps in every[0].items():
        assert steps == sorted(steps) and set(steps) == ({1, 2} if name.startswith("0") else {1}), name
        assert len(steps) > (20 if name.startswith("0") else 3)


# -- ranks that are killed indeed ---------------------------------------------------------------------------------


def answers(folder: Path, jobs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of the ranks of each job; each has a folder of its own."""
    folder.mkdir()
    lines = "".join(
        json.dumps({"folder": str(folder / f"job{k:03}"), "keep": 1, **job}) + "\n" for k, job in enumerate(jobs)
    )
    script = Path(__file__).parents[1] / "support" / "killed_saves.py"
    done = subprocess.run(
        [sys.executable, str(script)], input=lines, capture_output=True, text=True, timeout=200, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == lines.count("\n"), done.stderr
    return found


def step_in(folder: Path) -> int:
    """The step of the newest whole checkpoint; all of it is of that step."""
    state = empty(0, "one process") | {"large": torch.zeros(6, 500)}
    found = checkpoint.load(folder, state)
    large = found.pop("large")
    check(found, found["step"], "one process")
    assert (large == found["step"]).all()
    return found["step"]


# the victim, None: all; and the place at which it touches the folder, or the size of its file
JOBS: list[dict[str, Any]] = [
    {"ranks": 1, "victim": 0, "place": 4},
    {"ranks": 2, "victim": 0, "place": 0},
    {"ranks": 2, "victim": 0, "place": 7},
    {"ranks": 2, "victim": 1, "place": 0},
    {"ranks": 2, "victim": 1, "size": 1000},
    {"ranks": 2, "victim": None, "place": 3},
    {"ranks": 2, "victim": None, "place": 12},
]


def test_ranks_that_are_killed(tmp_path: Path) -> None:
    steps = []
    for job in answers(tmp_path / "jobs", JOBS):
        folder, codes = Path(job["folder"]), job["codes"]
        assert all(code in (SAVED, REFUSED, *KILLED) for code in codes) and set(codes) & set(KILLED), job
        steps.append(step_in(folder))
        path = checkpoint.save(folder, {"again": torch.ones(2)}, keep=1)  # and the next save goes well, and clears up
        assert sorted(one.name for one in folder.iterdir()) == [path.name, "latest"]
        same(checkpoint.load(folder, {"again": torch.zeros(2)}), {"again": torch.ones(2)})
    assert set(steps) == {1, 2}, steps
