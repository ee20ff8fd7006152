"""``autopar train --elastic``: which mesh and how many micro-batches it takes, and what it refuses before it starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from train_command import alone, command  # noqa: F401  # a fixture of all tests here

from autopar import checkpoint
from autopar.cli.train.check import check
from autopar.cli.train.launched import Launched
from autopar.cli.train.options import TrainOptions
from autopar.cli.train.refused import Refused

SHORT = ("--simulate", "--batch", "8", "--sequence", "16", "--steps", "2", "--mesh", "dp=1")


def launched(ranks: int, local: int = 2) -> Launched:
    return Launched(rank=0, size=ranks, local_rank=0, local_size=local)


def options(folder: Path, **given: object) -> TrainOptions:
    return TrainOptions(**{"elastic": True, "checkpoint": str(folder), "device": "cpu", "batch": 16, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "given", "mesh", "microbatches"),
    [
        (4, {}, "dp=2 tp=2", 1),
        (2, {}, "dp=1 tp=2", 2),
        (8, {}, "dp=4 tp=2", 1),
        (2, {"microbatches": 4}, "dp=1 tp=2", 8),
        (2, {"meshes": "dp=2,tp=2; tp=2"}, "tp=2", 2),
        (2, {"meshes": "dp=2,tp=2;dp=2"}, "dp=2", 1),
        (2, {"mesh": "pp=2,dp=2", "microbatches": 2}, "pp=2 dp=1", 4),
        (6, {"mesh": "ep=2,tp=2", "meshes": "dp=3,tp=2", "batch": 12, "microbatches": 3}, "dp=3 tp=2", 2),
    ],
)  # fmt: skip
def test_the_mesh_of_the_ranks_that_are_there(
    ranks: int, given: dict[str, object], mesh: str, microbatches: int, tmp_path: Path
) -> None:
    """A rank computes as many rows at a time as on ``--mesh``, or fewer where the mesh that grows has no more."""
    if ranks == 8:
        given = {"microbatches": 2}
    checked = check(options(tmp_path, **given), launched(ranks))
    assert str(checked.mesh) == mesh and checked.step_options["microbatches"] == microbatches
    assert checked.options.resume and checked.options.batch == given.get("batch", 16)


REFUSED: list[tuple[dict[str, object], int, str]] = [
    ({"checkpoint": None}, 4, "--elastic goes on from the newest checkpoint, but no folder is named; add --checkpoint "
     "FOLDER"),
    ({"elastic": False, "meshes": "tp=2"}, 4, "--meshes are the meshes that --elastic may choose, which is not given"
     "; add it, or use --mesh"),
    ({"meshes": "dp=2,tp=2;tp=2"}, 6, "--elastic: the job has 6 ranks, and no allowed mesh has as many: dp=2,tp=2 has "
     "4; tp=2 has 2; allow with --meshes a mesh of 6; or start with torchrun --nnodes 1:2: .*"),
    ({"meshes": "dp=2,tp=2"}, 2, "--elastic: the job has 2 ranks, .* the hosts that are left wait for another one"),
    ({}, 3, "--elastic: the job has 3 ranks, and no allowed mesh has as many: dp=*,tp=2 has multiples of 2; allow .*"),
    ({}, 12, "--elastic: on the mesh (dp=6 tp=2) 6 ranks split the batch, and 6 × 8 rows do not divide the global "
     "batch of 16; use .*"),
    ({"meshes": "dp=2;dp=3"}, 2, "--elastic: on the mesh (dp=3) 3 ranks split .*"),
    ({"meshes": "dp2"}, 2, "--elastic: 'dp2' is not a list of different axes .*"),
    ({"meshes": "dp=2,tp=2;tp=2", "zero": 1}, 4, "--zero 1 splits over a data axis, and --mesh tp=2 has none; .*"),
    ({"meshes": "dp=2,tp=2;dp=2", "plan": "megatron"}, 4, "the preset 'megatron' splits over an axis named tp, and the "
     "mesh (dp=2) has none; .*"),
    ({"batch": 6, "microbatches": 2}, 4, "--elastic keeps the rows that a rank computes at a time, and --batch 6 is no "
     "multiple of the 4 pieces of --mesh dp=2,tp=2 and --microbatches 2; use --batch 8"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "ranks", "said"), REFUSED)
def test_what_is_refused(
    given: dict[str, object], ranks: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a mesh that would be needed after a loss alone."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    pattern = re.escape(said).replace(r"\.\*", ".*")
    with pytest.raises((Refused, ValueError), match=f"^{pattern}$"):
        check(options(tmp_path, **given), launched(ranks))


def test_it_needs_a_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--elastic", "--checkpoint", str(tmp_path)) == 2
    assert re.fullmatch(
        r"autopar: --elastic needs a launcher that notices the loss of a host and starts the ranks again; start it "
        r"with torchrun --nnodes 1:2 .* -m autopar train …\n",
        capsys.readouterr().err,
    )


@pytest.mark.long
def test_a_checkpoint_of_another_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank says it, before they meet."""
    assert command(*SHORT, "--checkpoint", str(tmp_path)) == 0
    assert checkpoint.latest(tmp_path) is not None
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    elastic = ("--elastic", "--mesh", "dp=2", "--checkpoint", str(tmp_path), "--sequence", "16", "--steps", "2")
    for changed, said in {
        "--size small": "--size is small, and in the checkpoint in FOLDER it was tiny; give --size as it was, or .*",
        "--batch 16": "--batch is 16, and in the checkpoint in FOLDER it was 8; .*",
        "--seed 3": "--seed is 3, and in the checkpoint in FOLDER it was 0; .*",
    }.items():
        capsys.readouterr()
        assert command(*elastic, *changed.split()) == 2
        assert re.fullmatch(f"autopar: {said}\n".replace("FOLDER", re.escape(str(tmp_path))), capsys.readouterr().err)
