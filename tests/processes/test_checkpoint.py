"""Checkpoints: any mesh to any other, nothing but data, whole or refused."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import checkpoints
import pytest
import strategies
import torch
from checkpoints import MESHES, Malicious, empty, loaded, placed, saved, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ranks
from safetensors.torch import load_file
from torch.distributed.tensor import Placement, Replicate, Shard
from typer.testing import CliRunner

from autopar import checkpoint
from autopar.cli.app import app
from autopar.errors import CheckpointError
from autopar.torch_private import strided_shard


@pytest.mark.parametrize("mesh", MESHES)
def test_from_any_mesh_to_any_other(tmp_path: Path, mesh: str) -> None:
    """Also the same file format: a process that is alone reads what four have written, and they what it has."""
    folder = str(tmp_path)
    paths = [saved(folder, 3, mesh)] if not MESHES[mesh] else ranks(4).run(saved, folder, 3, mesh)
    assert set(paths) == {str(tmp_path / "checkpoint-000001")}
    for other in MESHES:
        if MESHES[other]:
            ranks(4).run(loaded, folder, 3, other)
        else:
            loaded(folder, 3, other)


def placements(draw: st.DrawFn, shape: tuple[int, ...], axes: dict[str, int]) -> tuple[Placement, ...]:
    """Public ones, and those of a merged dim where it divides."""
    found: list[Placement] = []
    for size in axes.values():
        whole = [d for d in range(len(shape)) if not any(type(one) is not Replicate and one.dim == d for one in found)]
        merged = [
            strided_shard(d, parts) for d in whole for parts in (2, 3) if shape[d] and shape[d] % (parts * size) == 0
        ]
        again = [
            Shard(d)
            for d in range(len(shape))
            if d in whole or any(type(one) is Shard and one.dim == d for one in found)
        ]
        found.append(draw(st.sampled_from([Replicate(), *again, *merged])))
    return tuple(found)


@st.composite
def specs(draw: st.DrawFn) -> list[checkpoints.Spec]:
    made = []
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(strategies.shapes())
        axes, others = (draw(st.sampled_from([{"dp": 2, "tp": 2}, {"tp": 4}])) for _ in range(2))
        made.append((shape, axes, placements(draw, shape, axes), others, placements(draw, shape, others)))
    return made


@settings(max_examples=25, deadline=None)
@given(given_specs=specs())
def test_from_any_layout_to_any_other(
    tmp_path_factory: pytest.TempPathFactory, given_specs: list[checkpoints.Spec]
) -> None:
    ranks(4).run(checkpoints.relaid, str(tmp_path_factory.mktemp("relaid")), given_specs)


def test_training_goes_on_on_another_mesh(tmp_path: Path) -> None:
    ranks(4).run(checkpoints.trained, str(tmp_path))


def test_saving_in_a_thread(tmp_path: Path) -> None:
    for how, text in ranks(4).run(checkpoints.in_a_thread, str(tmp_path)):
        assert how == "CheckpointError" and text.startswith(
            f"no checkpoint was written to {tmp_path}/latest/in: rank 0: "
        )


def test_no_rank_holds_a_whole_tensor(tmp_path: Path) -> None:
    """A tensor of 128 MiB, saved in rows and loaded in columns."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not tell the peak of memory")
    for saving, loading in ranks(4).run(checkpoints.extra_memory, str(tmp_path), 2**15):
        assert max(saving, loading) < 24 * 2**20
    shutil.rmtree(tmp_path)


# -- files -------------------------------------------------------------------------------------------------------


def test_files_are_safetensors(tmp_path: Path) -> None:
    paths = ranks(4).run(saved, str(tmp_path), 2, "dp=2 tp=2")
    found: dict[str, torch.Tensor] = {}
    for rank in range(4):
        found |= load_file(Path(paths[0]) / f"rank-{rank:05}.safetensors")
    assert torch.equal(
        torch.cat([found["model/up.weight[0:6,0:8]"], found["model/up.weight[6:12,0:8]"]]),
        whole(2)["model"]["up.weight"],
    )
    assert torch.equal(found["optimizer/state/scale/exp_avg"], whole(2)["optimizer"]["state"]["scale"]["exp_avg"])


# -- what does not fit, and what is there --------------------------------------------------------------------------


def test_a_state_that_does_not_fit_is_refused_untouched(two: Path) -> None:
    state = empty(2, "one process")
    model = state["model"]
    model["up.wieght"] = model.pop("up.weight")
    model["uneven"] = torch.zeros(5, 7, dtype=torch.float64)
    model["few"] = model["few"].float()
    state["step"] = torch.tensor(0)
    state["epoch"] = 1
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(two, state)
    assert str(caught.value) == (
        f"{two / 'checkpoint-000002'} does not fit the state"
        "\n    model/uneven is float64 [7 5] in the checkpoint, and float64 [5 7] in the state"
        "\n    model/few is int64 [2 3] in the checkpoint, and float32 [2 3] in the state"
        "\n    model/up.wieght is in the state, and not in the checkpoint, which has model/up.weight"
        "\n    step is a tensor in the state, and none in the checkpoint"
        "\n    model/up.weight is in the checkpoint, and not in the state, which has model/up.wieght"
        "\n    epoch is in the state, and not in the checkpoint"
        "\n  pass a state of the same keys and shapes, or strict=False to load what both have"
    )
    assert not model["uneven"].any()
    del model["uneven"], model["few"]
    found = checkpoint.load(two, state, strict=False)
    assert found["step"] == 2 and found["model"]["up.weight"] is None
    assert torch.equal(found["model"]["down.weight"], whole(2)["model"]["down.weight"])
    assert found["model"]["down.weight"] is model["down.weight"]
    with pytest.raises(
        CheckpointError,
        match=r"does not fit the state; only 0 of 23 tensors have a name that the state has, so the checkpoint may be "
        r"of another model\n",
    ):
        checkpoint.load(two, {f"layers.{k}": torch.ones(1) for k in range(9)})


def test_the_command_tells_what_is_there(two: Path, tmp_path: Path) -> None:
    def asked(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["checkpoint", *arguments])
        return result.exit_code, result.stdout, result.stderr

    status, out, _ = asked(str(two), "--verify")
    lines = out.splitlines()
    assert status == 0
    size = sum(file.stat().st_size for file in (two / "checkpoint-000002").glob("rank-*"))
    assert (
        lines[0] == f"checkpoint-000002   step 2, 23 tensors, {size:,} bytes in 4 files, by torch {torch.__version__}"
    )
    assert lines[1].startswith("checkpoint-000001   step 1, 23 tensors, ")
    assert lines[3:5] == [lines[0], "all files are unchanged since they were written"]
    assert "model/up.weight" in lines[5] and lines[5].split()[1:] == ["bfloat16", "[12", "8]", "192", "bytes"]
    assert any(line.split() == ["data/seen", "[2,", "3]"] for line in lines)
    broken = two / "checkpoint-000002" / "rank-00003.safetensors"
    before = broken.read_bytes()
    broken.write_bytes(before[:-1] + b"x")
    assert asked(str(two))[0] == 0
    assert asked(str(two / "checkpoint-000002"), "--verify")[::2] == (
        2,
        f"autopar: {broken} is damaged: it has changed since it was written: its CRC-32 differs; load another "
        f"checkpoint, by its own path\n",
    )
    broken.write_bytes(before[:-1])
    status, out, _ = asked(str(two))
    assert (
        status == 0
        and out.splitlines()[0]
        == f"checkpoint-000002   {broken} has {len(before) - 1} bytes, and was written with {len(before)}"
    )
    assert out.splitlines()[3].startswith("checkpoint-000001   step 1")
    broken.write_bytes(before)
    assert asked(str(tmp_path))[::2] == (
        2,
        f"autopar: {tmp_path} has no checkpoint.json, so it is no checkpoint; load a folder that "
        f"autopar.checkpoint.save has written\n",
    )


# -- code ---------------------------------------------------------------------------------------------------------


def test_loading_runs_no_code(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, newest = tmp_path / "ran", two / "checkpoint-000002"
    payload = pickle.dumps(Malicious(ran))
    pickle.loads(payload)
    assert ran.exists(), "the payload works"
    ran.unlink()

    def tried(path: Path) -> None:
        state = empty(2, "one process")
        checkpoints.told(lambda: checkpoint.load(path, state))
        assert not ran.exists()

    for file in sorted(newest.iterdir()):
        before = file.read_bytes()
        for content in (payload, payload.ljust(len(before), b"."), (payload + before)[: len(before)]):
            file.write_bytes(content)
            tried(newest)
        file.write_bytes(before)

    evil = Path(
        checkpoint.save(
            tmp_path / "evil",
            {
                "bytes": torch.frombuffer(bytearray(payload), dtype=torch.uint8),
                "plain": payload,
                "text": payload.decode("latin1"),
            },
        )
    )
    for name in (".metadata", "__0_0.distcp", "0.metadata"):
        (evil / name).write_bytes(payload)
    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("something is unpickled"))
    found = checkpoint.load(evil, {"bytes": torch.zeros(len(payload), dtype=torch.uint8), "plain": b"", "text": ""})
    assert bytes(found["bytes"].tolist()) == payload == found["plain"]
    assert not ran.exists()
    loaded(str(newest), 2, "one process")


# -- ranks that differ --------------------------------------------------------------------------------------------

DIFFERENT = (
    "the ranks bring different states\n    {}\n  let all ranks pass the same folder and the same keys; what "
    "differs from rank to rank goes in as a DTensor that is split over them, or in a list that all ranks have"
)
TOLD = {
    "a key": DIFFERENT.format("more   ranks 0 1 3: nothing of that name   rank 2: float32 [2]"),
    "a value": DIFFERENT.format("step   ranks 0 1 3: 1   rank 2: 2"),
    "a generator": DIFFERENT.format("rng   rank 0: int64 [1] with the CRC-32 01000000   rank 1: "),
    "no "
    "data": "rank 2 failed, so no rank goes on: TypeError: step is an object, which a checkpoint cannot keep as data; "
    "save tensors",
    "a folder": DIFFERENT.format("folder   ranks 0 1 3: {short}   rank 2: {short}x"),
    "a load": DIFFERENT.format("w   ranks 0 1 3: float32 [8] (Shard(dim=0),) on (4,)   rank 2: float32 [8]"),
    "nothing": "there is no folder {folder}/none; name the folder that you passed to autopar.checkpoint.save, or a "
    "checkpoint in it",
    "no fit": "{folder}/checkpoint-000001 does not fit the state\n    v is in the state, and not in the checkpoint\n  "
    "pass a state of",
    "no folder": "no checkpoint was written to {folder}/latest/in: rank 0: [Errno 20] Not a directory: "
    "'{folder}/latest/in'",
    "full": "no checkpoint was written to {folder}: rank 2: {folder}/.writing-000002-",
    "pending": "g is pending over dp, and has no values yet; reduce it first",
}


def short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:30]}…{text[-49:]}"


def test_a_failure_of_one_rank_is_one_of_all(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    answers = ranks(4).run(checkpoints.refused, folder)
    for rank, answer in enumerate(answers):
        for case, (how, text) in answer.items():
            own = {"nothing": "FileNotFoundError", "pending": "ValueError"}.get(
                case, "TypeError" if (case, rank) == ("no data", 2) else "CheckpointError"
            )
            assert how == own, (case, rank, text)
            if how != "TypeError":
                wanted = (
                    TOLD[case]
                    .replace("{folder}", folder)
                    .replace("{short}x", short(f"{folder}x"))
                    .replace("{short}", short(folder))
                )
                assert text.startswith(wanted) or (
                    case == "a generator" and "\n    rng   rank 0: int64 [1] with the CRC-32 " in text
                ), (case, rank, text)
        assert "File too large; make room, or name another folder, and save again" in answer["full"][1]
    assert sorted(path.name for path in Path(folder).iterdir()) == ["checkpoint-000001", "latest"]
    how, text = ranks(4).run(checkpoints.elsewhere, folder)[3]
    assert (
        how == "CheckpointError"
        and "is not the file that a rank has written there; let all ranks have the same folder, on a file system that "
        "they share"
        in text
    )
    assert placed(1, "one process")["step"] == 1
