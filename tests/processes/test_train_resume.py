"""``autopar train --checkpoint --resume``: a training that is killed and goes on has the numbers of one that is not."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train_command import alone, command  # noqa: F401  # a fixture of all tests here too
from train_jobs import LIMIT, Command, Forked, wait_for_line

from autopar import checkpoint

SHORT = ("--simulate", "--batch", "4", "--sequence", "16", "--every", "2")


def curve(folder: Path) -> list[Any]:
    """Loss, norm and whether it was skipped, of each step in the newest checkpoint; an infinite norm as 0, for nan is
    not nan."""
    found = checkpoint.load(folder, {}, strict=False)["curve"]
    return [[loss, norm if math.isfinite(norm) else 0, skipped] for loss, norm, skipped in found]


def weights(folder: Path) -> list[bytes]:
    """The bytes of all tensors in the newest checkpoint."""
    newest = checkpoint.latest(folder)
    assert newest is not None
    return [file.read_bytes() for file in sorted(newest.glob("*.safetensors"))]


# -- in this process


RESUMED = {  # how the first half is trained → the second; without a schedule that ends with the first half
    "the same mesh": ("--mesh dp=2 --zero 1 --clip-norm 1", "--mesh dp=2 --zero 1 --clip-norm 1"),
    "fp16": (
        "--mesh dp=2 --zero 1 --amp fp16-O2 --loss-scale 1e9",
        "--mesh dp=2 --zero 1 --amp fp16-O2 --loss-scale 1e9",
    ),
    "another mesh": ("--mesh dp=2 --zero 3 --microbatches 2", "--mesh dp=2,tp=2 --zero 1"),
}


@pytest.mark.parametrize("how", RESUMED)
def test_resumed(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of its losses are compared with those of the single device, those before too."""
    before, after = (part.split() for part in RESUMED[how])
    half, whole = tmp_path / "half", tmp_path / "whole"
    assert command(*SHORT, *before, "--steps", "3", "--checkpoint", str(half), "--resume") == 0
    out = capsys.readouterr().out
    assert f"{half} has no checkpoint: step 1 is the first" in " ".join(out.split())
    # after 2 and at the end
    assert [path.name for path in sorted(half.glob("checkpoint-*"))] == ["checkpoint-000001", "checkpoint-000002"]
    assert command(*SHORT, *after, "--steps", "6", "--checkpoint", str(half), "--resume") == 0
    out = capsys.readouterr().out
    assert f"resumed from {half}, after step 3 of 6" in " ".join(out.split())
    assert (
        "the same numbers: 6 losses differ by" in out
        and "  step 4/6  loss" in out
        and "  step 3/6" not in out.partition("on a single")[0]
    )
    assert command(*SHORT, *before, "--steps", "6", "--checkpoint", str(whole)) == 0
    if before == after:
        assert curve(half) == curve(whole) and weights(half) == weights(whole)
    for one, other in zip(curve(half), curve(whole), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_training_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is compared again, and nothing is trained."""
    given = (*SHORT, "--mesh", "dp=1", "--steps", "2", "--warmup", "1", "--checkpoint", str(tmp_path), "--resume")
    assert command(*given) == 0
    capsys.readouterr()
    assert command(*given) == 0
    assert "the same numbers: 2 losses differ" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000001"]


REFUSED = {
    "--lr "
    "0.1": r"--lr is 0\.1, and in the checkpoint in FOLDER it was 0\.002; give --lr as it was, or name another folder",
    "--text book.txt": r"--text is book\.txt \(100 bytes, crc32 \w+\), and in the checkpoint in FOLDER it was Python's "
    r"standard library \(.*\); .*",
    "--clip-norm 1": r"--clip-norm is 1\.0, and in the checkpoint in FOLDER it was inf; .*",
    "--amp bf16-O1": r"--amp is bf16-O1, and in the checkpoint in FOLDER it was none; .*",
    "--warmup 1": r"--warmup is 1, and in the checkpoint in FOLDER it was 0; .*",
    "--steps 1": r"--steps 1, but the checkpoint in FOLDER has taken 2 already; give --steps 2 or more",
}


def test_what_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is built, or a process started."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("x" * 100)
    folder = tmp_path / "kept"
    given = (*SHORT, "--mesh", "dp=1", "--steps", "2", "--checkpoint", str(folder), "--resume")
    assert command(*given) == 0
    capsys.readouterr()
    for change, told in REFUSED.items():
        assert command(*given, *change.split()) == 2
        out, err = capsys.readouterr()
        assert out == "" and re.fullmatch(f"autopar: {told}\n".replace("FOLDER", re.escape(str(folder))), err), err
    checkpoint.save(tmp_path / "other", {"model": torch.zeros(2)})
    assert command(*SHORT, "--mesh", "dp=1", "--checkpoint", str(tmp_path / "other"), "--resume") == 2
    assert (
        capsys.readouterr().err
        == f"autopar: --checkpoint {tmp_path / 'other'} is not of autopar train; name another folder\n"
    )


# -- killed

JOB = ["--device", "cpu", "--mesh", "dp=2", "--zero", "1", "--batch", "4", "--sequence", "16", "--steps", "16",
       "--every", "2", "--warmup", "3", "--clip-norm", "1", "--microbatches", "2", "--resume"]  # fmt: skip


def saving(job: Forked | Command, folder: Path) -> None:
    """Wait for a checkpoint that is being written, after two more are whole."""
    newest = checkpoint.latest(folder)
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit and job.running():
        # in this order: a save takes some milliseconds
        if any(folder.glob(".writing-*")) and checkpoint.latest(folder) != newest:
            return
    job.kill(everything=True)
    raise AssertionError(f"no checkpoint was written\n{job.end()[1][-4000:]}")


KILLS: tuple[tuple[Callable[[Forked | Command, Path], None], bool], ...] = (  # when, and whether all of it or one rank
    (lambda job, folder: wait_for_line(job, "  step 4: "), True),
    (saving, False),
)
# the save that waits for the other rank, or the watch, is the first to see it
TOLD = {Forked: " was lost", Command: "was killed by SIGKILL"}


@pytest.mark.parametrize("start", [
    Forked,
    pytest.param(Command, marks=[
        pytest.mark.sweep("test_launch kills ranks and launcher, and the ranks of this test the training"),
        pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="who the ranks are is read in /proc"),
    ]),
])  # fmt: skip
def test_killed_trainings_have_the_numbers_of_one_that_is_not(start: type[Forked | Command], tmp_path: Path) -> None:
    """First all of it, then one rank in the middle of a save; each time it goes on from the newest checkpoint. Bit for
    bit, the weights too."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def started(folder: Path, name: str) -> Forked | Command:
        return start([*JOB, "--checkpoint", str(folder)], tmp_path / f"{name}.txt")

    taken = 0
    for number, (moment, everything) in enumerate(KILLS):
        job = started(killed, f"killed{number}")
        moment(job, killed)
        job.kill(everything)
        well, out = job.end()
        assert not well and "the same numbers" not in out
        assert everything or TOLD[start] in out, out
        before, taken = taken, len(curve(killed))
        assert before < taken < 16, "each time it came further, and not to its end"
    well, out = started(killed, "resumed").end()
    assert well and f"resumed from {killed}, after step {taken} of 16" in " ".join(out.split()), out
    assert "the same numbers: 16 losses differ by" in out
    well, out = started(whole, "whole").end()
    assert well, out
    assert curve(killed) == curve(whole) and len(curve(whole)) == 16
    assert weights(killed) == weights(whole)
