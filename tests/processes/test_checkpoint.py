"""Checkpoints: any mesh to any other, nothing but data, whole or refused."""

from __future__ import annotations

import json
import math
import pickle
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import strategies
import torch
from checkpoints import MESHES, Malicious, empty, loaded, placed, same, saved, whole
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import ranks
from safetensors.torch import load_file
from torch.distributed.tensor import Placement, Replicate, Shard
from typer.testing import CliRunner

from autopar import checkpoint
from autopar.checkpoint import files, pieces, values
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


# -- values -------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.binary(max_size=4),
    st.sampled_from(["$tensor", "$", "a/b", "~1", "", "0"]),
    st.integers(0, 3).map(lambda n: torch.arange(n)),
)  # fmt: skip
KEYS = st.one_of(
    st.integers(-2, 2), st.sampled_from(["$tensor", "$items", "a/b", "a~1b", "a", "b", "", "0"]), st.text(max_size=3)
)


def keys_apart(state: dict[Any, Any]) -> bool:
    return len({str(key) for key in state}) == len(state)


TREES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
                                     st.dictionaries(KEYS, inner, max_size=3).filter(keys_apart))
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=4).filter(keys_apart))
@example({0: [torch.arange(1)], "": [[torch.arange(2)]]})  # an empty key has a name of its own
def test_values_come_back_as_they_were(state: dict[Any, Any]) -> None:
    tensors, tree = values.encode_state(state)
    same(values.decode_state(json.loads(json.dumps(tree, allow_nan=False)), tensors), state)
    assert set(tensors) <= set(values.names(tree))


def test_generators_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "torch": torch.get_rng_state(), "numpy": np.random.get_state(),
        "new": np.random.default_rng(7).bit_generator.state, "python": random.getstate(), "lr": np.float64(0.1),
        "size": torch.Size((2, 3)), "nan": float("nan"), "count": np.int64(3),
    }  # fmt: skip
    checkpoint.save(tmp_path, state)
    again = checkpoint.load(tmp_path, dict(state, torch=torch.zeros_like(state["torch"])))
    assert (
        torch.equal(again["torch"], state["torch"])
        and again["python"] == state["python"]
        and again["new"] == state["new"]
    )
    assert math.isnan(again["nan"]) and (again["lr"], again["size"], again["count"]) == (0.1, (2, 3), 3)
    np.testing.assert_equal(again["numpy"], state["numpy"])
    np.random.set_state(again["numpy"])


class Layer(torch.nn.Linear):
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "a "
    "module": ({"model": Layer(2, 2)},
               "TypeError: model is a Layer, which a checkpoint cannot keep as data; pass its state_dict()"),
    "a "
    "dtype": ({"a": {"b": torch.float32}},
              "TypeError: a/b is a dtype, which a checkpoint cannot keep as data; save tensors, numbers, texts, "
              "bytes, lists, tuples, dicts and None"),
    "a key": ({"a": {1.5: 2}}, "TypeError: a has the key 1.5; a checkpoint keeps keys that are texts or whole numbers"),
    "objects": ({"a": np.array([object()])},
                "TypeError: a is a ndarray, which a checkpoint cannot keep as data; save tensors"),
    "one "
    "name": ({"a": {0: torch.ones(1), "0": torch.ones(1)}},
             "ValueError: two tensors of the state are called a/0; give them other keys"),
    "no "
    "dict": ([torch.ones(1)],
             'TypeError: the state is a list; pass a dict, such as {"model": model.state_dict(), "step": 7}'),
    "meta": ({"w": torch.empty(2, device="meta")},
             "ValueError: w is on the meta device and has no values; to_empty() and init it"),
    "sparse": ({"w": torch.eye(2).to_sparse()},
               "TypeError: w is sparse_coo, which a checkpoint cannot keep; it keeps dense tensors of float64, "
               "float32"),
    "complex": ({"w": torch.zeros(2, dtype=torch.complex128)},
                "TypeError: w is complex128 [2], which a checkpoint cannot keep; it keeps dense tensors of float64"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_data_is_refused(tmp_path: Path, case: str) -> None:
    state, message = REFUSED[case]
    how, text = checkpoints.told(lambda: checkpoint.save(tmp_path / "new", state))
    assert f"{how}: {text}".startswith(message)
    assert not (tmp_path / "new").exists()


# -- stretches ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(data=st.data())
def test_stretches_are_the_part_that_is_wanted(data: st.DataObject) -> None:
    sizes = data.draw(strategies.shapes(min_size=1))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in sizes)
    lengths = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(sizes, start, strict=True))
    limit, row = data.draw(st.sampled_from([1, 8, 40, 10**6])), data.draw(st.sampled_from([1, 8, 40]))
    stored = torch.arange(math.prod(sizes)).reshape(sizes)
    filled = torch.full(lengths, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "STRETCH", limit)
        patch.setattr(pieces, "ROW", row)
        for one in pieces.stretches(sizes, start, lengths, 2):
            count = math.prod(one.sizes)
            assert count * 2 <= max(limit, row, 2 * sizes[-1] if sizes else 2)
            filled[one.target] = stored.reshape(-1)[one.first : one.first + count].reshape(one.sizes)[one.wanted]
    assert torch.equal(filled, stored[tuple(slice(a, a + n) for a, n in zip(start, lengths, strict=True))])


# -- the folder ---------------------------------------------------------------------------------------------------


def test_old_ones_go_when_the_new_one_is_whole(tmp_path: Path) -> None:
    def there() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "none") is None
    first = saved(str(tmp_path), 1, "one process")
    copy = tmp_path / "best"
    Path(first).rename(copy)  # a name of one's own is left alone
    for step in range(2, 5):
        path = Path(saved(str(tmp_path), step, "one process"))
        assert checkpoint.latest(tmp_path) == path
        assert (tmp_path / "latest").read_text() == f"{path.name}\n"
    assert there() == ["best", "checkpoint-000002", "checkpoint-000003", "latest"]
    (tmp_path / ".writing-000007-12ab").mkdir()
    checkpoint.save(tmp_path, whole(5), keep=None)
    assert there() == ["best", "checkpoint-000002", "checkpoint-000003", "checkpoint-000008", "latest"]
    checkpoint.save(tmp_path, whole(6), keep=1)
    assert there() == ["best", "checkpoint-000009", "latest"]
    loaded(str(copy), 1, "one process")
    for keep in (0, -1, True, 1.5):
        with pytest.raises(
            ValueError, match=r"keep=.* would leave no checkpoint; keep 1 or more, or all with keep=None"
        ):
            checkpoint.save(tmp_path, whole(7), keep=keep)


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


def test_paths_as_a_shell_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in the user's own, relative ones, and links: to a folder, to a checkpoint, and among checkpoints."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    state = {"step": 1}
    assert checkpoint.save("~/own", state) == tmp_path / "own" / "checkpoint-000001" == checkpoint.latest("~/own")
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "one").symlink_to("own/checkpoint-000001")
    assert checkpoint.save("link", state | {"step": 2}) == Path("link/checkpoint-000002")
    assert [checkpoint.load(path, state)["step"] for path in ("~/own", "own", "link", "one")] == [2, 2, 2, 1]
    (tmp_path / "own" / "checkpoint-000001").rename("elsewhere")
    (tmp_path / "own" / "checkpoint-000001").symlink_to(tmp_path / "elsewhere")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        checkpoint.save("own", state, keep=1)
    assert not [one for one in warned if "tidied" in str(one.message)]
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["checkpoint-000003", "latest"]
    assert checkpoint.load("elsewhere", state)["step"] == 1


def test_two_jobs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save of the second one ends that of the first with an error; what is there is whole."""
    create = files.create

    def while_the_other_saves(path: Path) -> Any:
        monkeypatch.setattr(files, "create", create)
        checkpoint.save(tmp_path, {"w": torch.ones(2), "step": 9})
        return create(path)

    monkeypatch.setattr(files, "create", while_the_other_saves)
    with pytest.raises(
        CheckpointError,
        match=r"/\.writing-000001-\w+ was removed while it was written, as a save of another job does; give each job "
        r"a folder of its own$",
    ):
        checkpoint.save(tmp_path, {"w": torch.zeros(2), "step": 1})
    assert checkpoint.load(tmp_path, {"w": torch.zeros(2), "step": 0})["step"] == 9


def test_a_folder_that_cannot_be_tidied_is_told(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.warns(
        UserWarning,
        match=r"checkpoint-000001 is complete, but old checkpoints could not be removed: "
        r".*latest",
    ):
        saved(str(tmp_path), 1, "one process")
    loaded(str(tmp_path), 1, "one process")


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
    "data": "rank 2 failed, so no rank goes on: TypeError: step is a object, which a checkpoint cannot keep as data; "
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
