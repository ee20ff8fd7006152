"""Hosts of a job under torchrun are killed and come back: it goes on from the newest checkpoint, with equal numbers."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import elastic_training
import pytest
from elastic_agents import ElasticJob, Host, elastic_job
from elastic_training import EVERY, LAST_HOLD, STEPS
from train_jobs import Forked

from autopar import checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the ranks of a host are read in /proc")

STEP = re.compile(r"step (\d+) of (\d+) ranks: (\S+)")
NEXT = re.compile(
    r"autopar: step (\d+) of \d+ is next, on (.*), (?:from|and) .*?(?: has no checkpoint)?(?:; (\d+) steps? lost)?$",
    re.M,
)


def starts(host: Host) -> list[tuple[int, str, int]]:
    """First step, mesh and lost steps of each start that a host has printed."""
    return [(int(step), mesh, int(lost or 0)) for step, mesh, lost in NEXT.findall(host.text())]


def hold(job: ElasticJob, name: str) -> None:
    (job.folder / name).touch()


def wait_until_held(job: ElasticJob, name: str) -> None:
    file = job.folder / LAST_HOLD
    job.wait(lambda: file.exists() and file.read_text() == name, f"held at {name}")


def release(job: ElasticJob, name: str) -> None:
    (job.folder / LAST_HOLD).unlink()
    (job.folder / name).unlink()


def test_hosts_are_lost_and_come_back_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    """Before the first checkpoint, and within a save; in between one comes back, and has the first ranks."""
    script = str(Path(elastic_training.__file__))
    with elastic_job(tmp_path, script, str(tmp_path)) as job:
        first, second = job.start(address=2), job.start(address=3)
        hold(job, "hold-4")
        wait_until_held(job, "hold-4")
        second.kill()
        release(job, "hold-4")
        hold(job, "hold-9")
        job.wait(lambda: len(starts(first)) == 2, "the start without the second host")
        assert starts(first) == [(1, "dp=2 tp=2", 0), (1, "tp=2", 3)]
        wait_until_held(job, "hold-9")

        returned = job.start(address=1)
        job.wait(lambda: len(starts(returned)) == 1, "the start with the host that has come back")
        assert starts(returned) == [(6, "dp=2 tp=2", 3)]
        release(job, "hold-9")
        hold(job, "hold-save")
        wait_until_held(job, "hold-save")
        returned.kill()
        release(job, "hold-save")
        job.wait(lambda: len(starts(first)) == 3, "the start behind the save that was interrupted")
        assert starts(first)[2] == (6, "tp=2", EVERY), "the steps of an interval are the most that are lost"
        assert job.end() == [0, -9, -9]

    alone = elastic_training.alone()
    printed = [(int(step), int(ranks), float(loss)) for step, ranks, loss in STEP.findall(job.text())]
    assert {step for step, *_ in printed} == set(range(1, STEPS + 1))
    assert {ranks for step, ranks, _ in printed if step > 10} == {2}
    for step, _, loss in printed:
        assert loss == pytest.approx(alone[step - 1], rel=1e-6), step
    newest = checkpoint.load(tmp_path / "saved", {}, strict=False)
    assert newest["training"]["step"] == STEPS and newest["position"] == {"given": STEPS, "batches": 7}


TRAINING = ["--device", "cpu", "--batch", "8", "--sequence", "16", "--steps", "30", "--every", "5", "--warmup", "6",
            "--clip-norm", "1", "--zero", "1"]  # fmt: skip


def curve(folder: Path) -> list[Any]:
    return checkpoint.load(folder, {}, strict=False)["curve"]


def test_the_command_goes_on_with_the_host_that_is_left(tmp_path: Path) -> None:
    """Its curve is that of a training on the mesh that is left, from the checkpoint on, and of a single device."""
    kept, copy = tmp_path / "kept", tmp_path / "copy"
    command = ["-m", "autopar", "train", *TRAINING, "--mesh", "dp=2,tp=2", "--meshes", "dp=2,tp=2;dp=1,tp=2",
               "--elastic", "--checkpoint", str(kept)]  # fmt: skip
    with elastic_job(tmp_path, *command) as job:
        left, lost = job.start(address=1), job.start(address=2)
        job.wait(lambda: "  step 12/30" in left.text(), "step 12")
        lost.kill()
        job.wait(lambda: "lost (killed" in left.text() or "launcher of this job was lost" in left.text(), "the loss")
        shutil.copytree(kept, copy)
        assert job.end() == [0, -9]
    text = " ".join(left.text().split())
    found = re.search(r"elastic: step (\d+) of 30 is next, on dp=1 tp=2, from \S+; (\d+) steps? lost; 2 micro-b", text)
    assert found, left.text()
    taken = int(found[1]) - 1
    assert taken >= 10 and taken % 5 == 0 and int(found[2]) <= 5
    assert "the same numbers: 30 losses differ by" in text

    assert len(curve(copy)) == taken
    undisturbed = [*TRAINING, "--mesh", "dp=1,tp=2", "--microbatches", "2", "--resume", "--checkpoint", str(copy)]
    well, out = Forked(undisturbed, tmp_path / "undisturbed.txt").end()
    assert well, out
    for ours, theirs in zip(curve(kept), curve(copy), strict=True):
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-6) and math.isfinite(ours[0])
