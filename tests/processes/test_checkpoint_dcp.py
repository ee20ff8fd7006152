"""Folders of torch.distributed.checkpoint: FSDP2 writes and autopar goes on, and the other way round; no code of theirs
runs."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_folders
import merged_states
import pytest
import torch
from checkpoints import Malicious, told
from dcp_folders import STEPS, Simulated
from processes import ranks
from torch.distributed import checkpoint as dcp
from typer.testing import CliRunner

from autopar import checkpoint
from autopar.checkpoint import dcp_trees
from autopar.cli.app import app
from autopar.errors import CheckpointError

CASES = [("AdamW", False), ("SGD", True), ("AdamW", True)]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # torch's own, in a process that is alone
        yield


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "torchtitan"), CASES)
def test_fsdp2_writes_and_autopar_goes_on(tmp_path: Path, kind: str, torchtitan: bool) -> None:
    wanted = ranks(2).run(dcp_folders.sharded_writes, str(tmp_path / "dcp"), kind, torchtitan)[0]
    checkpoint.import_dcp(tmp_path / "dcp", tmp_path / "out", allow_pickle=True)
    training = Simulated(kind, 2)
    state = checkpoint.load(tmp_path / "out", training.step.state_dict())
    assert state["step"] == STEPS and torch.equal(state["rng"], torch.Generator().get_state())
    if torchtitan:
        assert state["train_state"] == {"step": STEPS, "ntokens_seen": 64} and state["dataloader"] == {
            "dp_rank_0": b"\x80\x00",
            "world_size": 2,
        }
    training.step.load_state_dict(state)
    training.train(STEPS)
    equal(training.weights(), wanted)


@pytest.mark.parametrize(("kind", "torchtitan"), CASES)
def test_autopar_writes_and_fsdp2_goes_on(tmp_path: Path, kind: str, torchtitan: bool) -> None:
    training = Simulated(kind, 1)
    training.train(0)
    checkpoint.save(tmp_path / "own", training.step.state_dict())
    assert checkpoint.export_dcp(tmp_path / "own", tmp_path / "dcp", torchtitan=torchtitan) == tmp_path / "dcp"
    training.train(STEPS)
    for weights in ranks(2).run(dcp_folders.sharded_reads, str(tmp_path / "dcp"), kind, torchtitan):
        equal(weights, training.weights())


def test_merged_dims_go_on_from_mesh_to_mesh(tmp_path: Path) -> None:
    names = ["dp2 tp2", "tp4", "dp4", "pp2 tp2", "dp2 tp2"]
    ranks(4).run(merged_states.states_of_steps, str(tmp_path), names)


@pytest.mark.parametrize("mesh", ["tp4", "pp2 tp2"])
def test_torchs_state_dicts_of_merged_dims(tmp_path: Path, mesh: str) -> None:
    ranks(4).run(merged_states.torchs_state_dicts, str(tmp_path / "dcp"), mesh)


def test_full_state_dicts_of_torch_are_refused_before_they_wait() -> None:
    on_stages = "are on the stages of a pipeline, and"
    waits = "with broadcast_from_rank0=True ranks would wait for those of other stages forever"
    empty = "full_state_dict=True would give each rank empty tensors for the other stages"
    each = "give each rank the whole state dict, and leave broadcast_from_rank0 out"
    leave = "call parallel.leave_stages() on all ranks before"
    for texts in ranks(4).run(merged_states.full_state_dicts):
        assert texts == [
            f"the parameters {on_stages} {waits}: {leave}",
            f"the parameters {on_stages} {empty}: {leave}",
            f"the state of the optimizer {on_stages} {waits}: {each}",
            f"the state of the optimizer {on_stages} {empty}: save step.state_dict(), with autopar.checkpoint or "
            f"torch.distributed.checkpoint",
            f"mix.qkv.weight has a dim whose parts are split one by one, and broadcast_from_rank0=True would cut it "
            f"as if the dim were split as a whole: {each}",
        ]


@pytest.mark.parametrize("torchtitan", [False, True])
def test_there_and_back(tmp_path: Path, torchtitan: bool) -> None:
    """Values of several dtypes, lists, numbers and texts, to the bit; groups of an optimizer whose options differ."""
    weights = {
        "a.weight": torch.randn(3, 4).bfloat16(),
        "a.weight.more": torch.randn(5),
        "b": torch.randn(2, 3, dtype=torch.float64),
        "none": torch.ones(0, 4),
    }
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.weight", "b"]},
        {"lr": 0.2, "betas": (0.9, 0.99), "params": ["a.weight.more"]},
    ]
    optimizer = {
        "state": {
            name: {"exp_avg": torch.randn(3), "step": torch.tensor(4.0)} for name in ("a.weight", "a.weight.more", "b")
        },
        "param_groups": groups,
    }
    state = {
        "model": weights,
        "optimizer": optimizer,
        "step": 4,
        "rng": torch.get_rng_state(),
        "extra": {"list": [1, "two", None, torch.ones(2)], "text": "x"},
    }
    checkpoint.save(tmp_path / "own", state)
    checkpoint.export_dcp(tmp_path / "own", tmp_path / "dcp", torchtitan=torchtitan)
    checkpoint.import_dcp(
        tmp_path / "dcp", tmp_path / "again", allow_pickle=True, skip=["extra.list*"] if torchtitan else []
    )
    target = {
        "model": {name: torch.zeros_like(value) for name, value in weights.items()},
        "optimizer": {"state": {}, "param_groups": []},
    }
    found = checkpoint.load(tmp_path / "again", target, strict=False)
    for name, value in weights.items():
        assert torch.equal(found["model"][name], value)
    assert found["optimizer"]["param_groups"] == groups and found["step"] == 4 and found["extra"]["text"] == "x"
    assert ("list" in found["extra"]) == (not torchtitan)


def test_an_optimizer_that_was_flattened() -> None:
    """Names of parameters that begin with those of others; a state in a state, as Shampoo's."""
    flat = {
        "state.a.b.exp": 1,
        "state.a.b.c.exp": 2,
        "state.a.b.c.inner.exp": 3,
        "param_groups.a.b.c.lr": 0.1,
        "param_groups.a.b.lr": 0.1,
        "param_groups.z.lr": 0.2,
    }
    found = dcp_trees.as_saved({"a.b": torch.ones(2), "a.b.c": torch.ones(2), "z": torch.ones(2), "optimizer": flat})
    assert list(found["model"]) == ["a.b", "a.b.c", "z"]
    assert found["optimizer"]["state"] == {"a.b": {"exp": 1}, "a.b.c": {"exp": 2, "inner.exp": 3}}
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1, "params": ["a.b", "a.b.c"]}, {"lr": 0.2, "params": ["z"]}]


def test_safetensors_need_no_word(tmp_path: Path) -> None:
    """What HuggingFaceStorageWriter has written has no pickle."""
    weights = {"up.weight": torch.randn(4, 3), "down.weight": torch.randn(3, 4)}
    mapping = {"up.weight": 1, "down.weight": 2}
    dcp.save(
        dict(weights),
        storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "hf"), fqn_to_index_mapping=mapping),
        no_dist=True,
    )
    checkpoint.import_dcp(tmp_path / "hf", tmp_path / "out")
    found = checkpoint.load(
        tmp_path / "out", {"model": {name: torch.zeros_like(value) for name, value in weights.items()}}
    )
    assert all(torch.equal(found["model"][name], value) for name, value in weights.items())


# -- what is refused ----------------------------------------------------------------------------------------------


def written(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def refused(source: Path, tmp_path: Path, **options: Any) -> str:
    text = ": ".join(told(lambda: checkpoint.import_dcp(source, tmp_path / "out", **options)))
    assert not (tmp_path / "out").exists()
    return text


def test_a_pickle_is_read_with_the_users_word_alone(tmp_path: Path) -> None:
    """And even then it runs no code."""
    ran = tmp_path / "ran"
    folder = written(tmp_path / "dcp", {"w": torch.ones(2), "n": 3})
    path = folder / ".metadata"
    assert refused(folder, tmp_path) == (
        f"CheckpointError: {path} is a pickle, and a pickle can run code when it is read; if you trust who wrote it, "
        f"pass allow_pickle=True, or --allow-pickle: then it is read by an unpickler that makes DCP's own "
        f"descriptions and nothing else"
    )
    path.write_bytes(pickle.dumps(Malicious(ran)))
    assert "is a pickle" in refused(folder, tmp_path)
    assert ", which is no part of DCP's descriptions and could run code; it was not read" in refused(
        folder, tmp_path, allow_pickle=True
    )
    path.write_bytes(b"cos\nsystem\n(S'touch " + str(ran).encode() + b"'\ntR.")
    assert refused(folder, tmp_path, allow_pickle=True) == (
        f"CheckpointError: {path} names os.system, which is no part of DCP's descriptions and could run code; it was "
        f"not read"
    )
    path.write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__init__'\ntR.")
    assert "names builtins.getattr, which is no part" in refused(folder, tmp_path, allow_pickle=True)
    path.write_bytes(b"ctorch\nload\n(S'x'\ntR.")
    assert "names torch.load, which is no part" in refused(folder, tmp_path, allow_pickle=True)
    assert not ran.exists()


def test_enumerations_as_the_first_releases_of_python_3_11_pickle_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = dcp.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(formats, "__reduce_ex__", lambda self, protocol: (getattr, (formats, self.name)))
    folder = written(tmp_path / "dcp", {"model": {"w": torch.arange(3.0)}})
    assert b"getattr" in (folder / ".metadata").read_bytes()
    checkpoint.import_dcp(folder, tmp_path / "out", allow_pickle=True)
    found = checkpoint.load(tmp_path / "out", {"model": {"w": torch.zeros(3)}})
    assert torch.equal(found["model"]["w"], torch.arange(3.0))


class Harmless:
    """No data, but nothing bad either."""


def test_values_that_are_no_data(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = written(tmp_path / "dcp", {"w": torch.ones(2), "bad": Malicious(ran), "other": Harmless()})
    text = refused(folder, tmp_path, allow_pickle=True, skip=["other"])
    assert text.startswith(f"CheckpointError: {folder} could not be read: rank 0: bad is no data: ") and text.endswith(
        "; leave it out with skip"
    )
    assert not ran.exists()
    checkpoint.import_dcp(folder, tmp_path / "out", allow_pickle=True, skip=["bad", "oth*"])
    assert not ran.exists()


def test_metadata_that_is_none(tmp_path: Path) -> None:
    folder = written(tmp_path / "dcp", {"w": torch.ones(2), "n": 3})
    path = folder / ".metadata"
    before = path.read_bytes()
    none = f"CheckpointError: {path} is no description of a DCP folder"
    for content in (b"", b"x", b"\x80\x04.", before[:-9], pickle.dumps({"a": 1}), pickle.dumps(3), b"(" * 10_000):
        path.write_bytes(content)
        assert refused(folder, tmp_path, allow_pickle=True).startswith(none), content
    path.write_bytes(before.replace(b"__0_0.distcp", b"../etc/passw"))
    assert (
        refused(folder, tmp_path, allow_pickle=True)
        == f"CheckpointError: {path} names the file '../etc/passw', which is not in the folder; it was not read"
    )
    path.write_bytes(before)
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:40])
    assert refused(folder, tmp_path, allow_pickle=True).startswith(
        f"CheckpointError: {folder} could not be read: rank 0: "
    )


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert (
        refused(tmp_path / "none", tmp_path)
        == f"FileNotFoundError: there is no folder {tmp_path / 'none'}; name the one that "
        f"torch.distributed.checkpoint.save has written"
    )
    assert refused(tmp_path, tmp_path) == (
        f"CheckpointError: {tmp_path} has no .metadata and no safetensors, so it is no DCP folder; name the one that "
        f"torch.distributed.checkpoint.save has written"
    )
    checkpoint.save(tmp_path / "own", {"w": torch.ones(2)})
    with pytest.raises(
        CheckpointError, match=f"^{tmp_path / 'own'} is there already, and not empty; name a new folder$"
    ):
        checkpoint.export_dcp(tmp_path / "own", tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"the checkpoint has no 'model'; export it without torchtitan$"):
        checkpoint.export_dcp(tmp_path / "own", tmp_path / "new", torchtitan=True)
    assert set(ranks(2).run(told_of_several)) == {
        "RuntimeError: autopar.checkpoint.import_dcp is for one process, and there are several; call it in a script "
        "of its own, or as autopar checkpoint"
    }


def told_of_several() -> str:
    return ": ".join(told(lambda: checkpoint.import_dcp("a", "b")))


def test_the_commands(tmp_path: Path) -> None:
    def asked(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
        return result.exit_code, result.stdout, result.stderr

    folder = written(tmp_path / "dcp", {"model": {"w": torch.ones(20)}, "step": 3})
    status, out, error = asked("import", folder, tmp_path / "out")
    assert (status, out) == (2, "") and error.startswith(
        f"autopar: {folder / '.metadata'} is a pickle, and a pickle can run code"
    )
    path = tmp_path / "out" / "checkpoint-000001"
    status, out, _ = asked("import", folder, tmp_path / "out", "--allow-pickle")
    assert status == 0 and out.startswith(f"{path}   step 3, 1 tensors, ")
    assert asked("export", tmp_path / "out", tmp_path / "new", "--torchtitan") == (
        0,
        f"{tmp_path / 'new'} is written\n",
        "",
    )
    assert asked("export", path, tmp_path / "new")[::2] == (
        2,
        f"autopar: {tmp_path / 'new'} is there already, and not empty; name a new folder\n",
    )
    assert asked(path, "--verify")[:1] == asked("--verify", path)[:1] == asked("show", path)[:1] == (0,)
    target = {"w": torch.zeros(20), "train_state": {"step": torch.tensor(0, dtype=torch.int32)}}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "new"), no_dist=True)
    assert target["w"].sum() == 20 and target["train_state"]["step"] == 3
