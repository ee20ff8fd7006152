"""Checkpoints that are not as they were written: the one before is loaded, or they are refused, and never with a raw
error."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import check, empty, loaded, same
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ranks

from autopar import checkpoint
from autopar.checkpoint import manifest, parsing, values
from autopar.cli.train.saved import check_resumed
from autopar.errors import CheckpointError


@contextmanager
def changed(file: Path, content: bytes) -> Iterator[None]:
    """A file has another content for a while."""
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def flipped(file: Path, bit: int) -> bytes:
    data = bytearray(file.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(data)


def error_of(function: Callable[[], Any]) -> str:
    return ": ".join(checkpoints.told(function))


# -- bits that flip -----------------------------------------------------------------------------------------------


def test_any_bit_that_flips_is_found(two: Path) -> None:
    """What is loaded is exactly the newest; or exactly the one before, and a warning names the file."""
    newest, older = two / "checkpoint-000002", two / "checkpoint-000001"
    files = [*sorted(newest.iterdir()), *sorted(older.iterdir()), two / "latest"]
    outcomes = set()

    @settings(max_examples=150, deadline=None)
    # often in the first bytes
    @given(file=st.sampled_from(files), bit=st.one_of(st.integers(0, 900), st.integers(0, 10**6)))
    def flip(file: Path, bit: int) -> None:
        with changed(file, flipped(file, bit)):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found = checkpoint.load(two, empty(2, "one process"))
            step = found["step"]
            check(found, step, "one process")
            outcomes.add((file.parent.name, step))
            if step == 1:
                (warning,) = warned
                assert str(warning.message).startswith(f"{file}") and str(warning.message).endswith(
                    "; checkpoint-000001 is taken, which is the newest whole one"
                )
                assert warning.filename == __file__
            else:
                assert step == 2 and not warned
            if file.parent == newest:  # by its own path, it is refused and nothing is touched
                state = empty(2, "one process")
                if error := error_of(lambda: check(checkpoint.load(newest, state), 2, "one process")).removeprefix(
                    "none: "
                ):
                    assert error.startswith(f"DamageError: {file}") or "has version" in error, error
                    same(state, empty(2, "one process"))

    flip()
    assert ("checkpoint-000002", 1) in outcomes and not {("checkpoint-000001", 1), (two.name, 1)} & outcomes
    loaded(str(two), 2, "one process")


def test_all_ranks_load_the_same(two: Path) -> None:
    """Each file is read by one rank, and what one finds, all heed; so it is with what one rank alone sees, as a bit
    that flips on its way."""
    file = two / "checkpoint-000002" / "rank-00003.safetensors"
    with changed(file, flipped(file, -1)):
        told = ranks(4).run(checkpoints.loaded_with_warnings, str(two), None)
    text = (
        f"{file} is damaged: it has changed since it was written: its CRC-32 differs; checkpoint-000001 is taken, "
        f"which is the newest whole one"
    )
    assert told == [(1, [text]), (1, []), (1, []), (1, [])]
    told = ranks(4).run(checkpoints.loaded_with_warnings, str(two), 2)
    assert [step for step, _ in told] == [1, 1, 1, 1] and "seen by rank 2; checkpoint-000001 is taken" in told[0][1][0]
    assert ranks(4).run(checkpoints.loaded_with_warnings, str(two), None) == [(2, [])] * 4


def test_where_all_are_damaged_each_is_told(two: Path) -> None:
    newest, older = two / "checkpoint-000002" / manifest.NAME, two / "checkpoint-000001" / "rank-00002.safetensors"
    state = empty(2, "one process")
    with changed(newest, newest.read_bytes()[:-9]), changed(older, flipped(older, -1)):
        assert error_of(lambda: checkpoint.load(two, state)) == (
            f"CheckpointError: {two} has no complete checkpoint"
            f"\n    {newest} is damaged: it has changed since it was written: its SHA-256 differs"
            f"\n    {older} is damaged: it has changed since it was written: its CRC-32 differs"
            f"\n  restore the files from a copy, or name a folder with another checkpoint"
        )
        options = SimpleNamespace(resume=True, checkpoint=str(two))
        assert error_of(lambda: check_resumed(SimpleNamespace(options=options))).startswith(
            f"CheckpointError: {two} has no complete checkpoint"
        ), "it would begin anew"
    same(state, empty(2, "one process"))
    options.checkpoint = str(two / "none")
    assert check_resumed(SimpleNamespace(options=options)) == 0


def test_what_is_cut_off_is_not_whole(two: Path) -> None:
    """It is refused where it is named; of a folder, the newest whole one is taken, and that is said."""
    newest, older = two / "checkpoint-000002", two / "checkpoint-000001"
    for file, left in itertools.product(sorted(newest.iterdir()), (0, 1, 0.5, -2, None)):
        before = file.read_bytes()
        file.unlink() if left is None else file.write_bytes(before[: int(left * len(before)) if left == 0.5 else left])
        assert checkpoint.latest(two) == older
        state = empty(1, "one process")
        with pytest.warns(
            UserWarning, match=rf"checkpoint-000002/.*{file.name}|checkpoint-000002 has no checkpoint.json"
        ) as warned:
            found = checkpoint.load(two, state)
        assert "; checkpoint-000001 is taken, which is the newest whole one" in str(warned[0].message)
        check(found, 1, "one process")
        with pytest.raises(CheckpointError, match=file.name):
            checkpoint.load(newest, state)
        file.write_bytes(before)
    assert checkpoint.latest(two) == newest


def test_what_does_not_fit_is_no_damage(two: Path) -> None:
    """The one before is not taken for it."""
    with pytest.raises(CheckpointError, match="checkpoint-000002 does not fit the state"):
        checkpoint.load(two, {"other": torch.ones(1)})


def test_errors_name_what_is_wrong(two: Path, tmp_path: Path) -> None:
    newest, state = two / "checkpoint-000002", empty(2, "one process")

    def error(path: Path) -> str:
        return error_of(lambda: checkpoint.load(path, state))

    (tmp_path / "weights.bin").write_bytes(b"x")
    assert (
        error(tmp_path)
        == f"FileNotFoundError: {tmp_path} has no complete checkpoint\n  name the folder that you passed to "
        f"autopar.checkpoint.save"
    )
    assert error(tmp_path / "none").startswith(
        f"FileNotFoundError: there is no folder {tmp_path / 'none'}; name the folder"
    )
    assert (
        error(Path("~nobody-of-this-name/x"))
        == "CheckpointError: ~nobody-of-this-name/x begins with the home folder of an unknown user; write the path in "
        "full"
    )
    assert (
        error(Path("a" * 300))
        == f"CheckpointError: {'a' * 300} cannot be read: File name too long; name the folder that you passed to "
        f"autopar.checkpoint.save"
    )
    file = newest / "rank-00001.safetensors"
    before = file.read_bytes()
    with changed(file, flipped(file, -1)):
        assert (
            error(newest)
            == f"DamageError: {file} is damaged: it has changed since it was written: its CRC-32 differs; load another "
            f"checkpoint, by its own path"
        )
    with changed(file, before[:-1]):
        assert (
            error(newest)
            == f"DamageError: {file} has {len(before) - 1} bytes, and was written with {len(before)}; load another "
            f"checkpoint, by its own path"
        )
    path = newest / manifest.NAME
    whole_text = path.read_text()
    for new, said in {
        whole_text.replace(
            '"version": 1', '"version": 3', 1
        ): "has version 3 of the format, and this autopar reads up to 1; load it with the autopar that wrote it, or a "
        "newer one",
        whole_text.replace(
            "exp_avg", "exp_abg", 1
        ): "is damaged: it has changed since it was written: its SHA-256 differs; load another checkpoint, by its own "
        "path",
        "{}": 'is no manifest of a checkpoint: line 1: it has no "format": "autopar checkpoint"; load another '
        "checkpoint, by its own path",
    }.items():
        with changed(path, new.encode()):
            assert error(newest).partition(": ")[2] == f"{path} {said}"
    loaded(str(two), 2, "one process")


# -- one of an earlier version ------------------------------------------------------------------------------------

EARLIER = {
    "checkpoint.json": (
        "eyJmb3JtYXQiOiAiYXV0b3BhciBjaGVja3BvaW50IiwgInZlcnNpb24iOiAxLCAic2hhMjU2IjogIjEwMzExOWZjYjk4NWI4Y2Y0"
        "NzNlOWM2YmUwMzgxZWFiNmEyMmVjNzZkY2JkNTdlZTUwYjRjOGM2NmI0ZmRmZjQifQp7InRvcmNoIjogIjIuMTMuMCtjcHUiLCAi"
        "c3RhdGUiOiB7InciOiB7IiR0ZW5zb3IiOiAidyJ9LCAic3RlcCI6IDcsICJiZXRhcyI6IHsiJHR1cGxlIjogWzAuOSwgMC45OV19"
        "fSwgInRlbnNvcnMiOiB7InciOiB7ImR0eXBlIjogIkYzMiIsICJzaGFwZSI6IFsyLCAyXSwgImNodW5rcyI6IFtbWzAsIDBdLCBb"
        "MiwgMl0sICJyYW5rLTAwMDAwLnNhZmV0ZW5zb3JzIiwgMTEyXV19fSwgImZpbGVzIjogW3sibmFtZSI6ICJyYW5rLTAwMDAwLnNh"
        "ZmV0ZW5zb3JzIiwgImJ5dGVzIjogMTI4LCAiY3JjMzIiOiA3NzI4NzI0NzB9XX0K"
    ),
    "rank-00000.safetensors": (
        "aAAAAAAAAAB7Il9fbWV0YWRhdGFfXyI6IHsiZm9ybWF0IjogInB0In0sICJ3IjogeyJkdHlwZSI6ICJGMzIiLCAic2hhcGUiOiBb"
        "MiwgMl0sICJkYXRhX29mZnNldHMiOiBbMCwgMTZdfX0gICAgIAAAgD8AAABAAABAQAAAgEA="
    ),
}


def test_what_an_earlier_version_has_written_is_loaded(tmp_path: Path) -> None:
    for name, data in EARLIER.items():
        (tmp_path / name).write_bytes(base64.b64decode(data))
    found = checkpoint.load(tmp_path, {"w": torch.zeros(2, 2), "step": 0, "betas": ()})
    same(found, {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "step": 7, "betas": (0.9, 0.99)})


# -- manifests that were made to do harm --------------------------------------------------------------------------

DEEP = "[" * 100_000
HEAD: dict[str, tuple[bytes, str]] = {
    "brackets": (DEEP.encode(), "line 1: it nests too deep"),
    "not UTF-8": (b'{"format": "\xff"}', "line 1, column 13: it is not UTF-8"),
    "no JSON": (b'{"format": autopar}', "line 1, column 12: Expecting value"),
    "nothing": (b"", "line 1, column 1: Expecting value"),
    "twice": (b'{"format": 1, "format": 2}', "line 1: the key 'format' is there twice"),
    "NaN": (b'{"format": NaN}', "line 1: 'NaN' is no finite number"),
    "too large": (b'{"format": 1e999}', "line 1: '1e999' is no finite number"),
    "digits": (b'{"format": ' + b"9" * 5000 + b"}", "line 1: a number has 5000 digits"),
    "a list": (b"[]", 'line 1: it has no "format": "autopar checkpoint"'),
}  # fmt: skip


def refused(path: Path, content: bytes) -> str:
    """The error that such a manifest has; the checkpoint before is taken all the same."""
    with changed(path, content):
        with pytest.warns(UserWarning, match="checkpoint-000001 is taken"):
            check(checkpoint.load(path.parent.parent, empty(1, "one process")), 1, "one process")
        return error_of(lambda: checkpoint.load(path.parent, empty(2, "one process"))).removesuffix(
            "; load another checkpoint, by its own path"
        )


@pytest.mark.parametrize("case", HEAD)
def test_a_first_line_that_is_hostile(two: Path, case: str) -> None:
    path, (content, said) = two / "checkpoint-000002" / manifest.NAME, HEAD[case]
    assert refused(path, content) == f"DamageError: {path} is no manifest of a checkpoint: {said}"


def signed(body: str | bytes) -> bytes:
    """A manifest as if it had been written so."""
    data = body.encode() if isinstance(body, str) else body
    head = {"format": manifest.FORMAT, "version": manifest.VERSION, "sha256": hashlib.sha256(data).hexdigest()}
    return f"{json.dumps(head)}\n".encode() + data + b"\n"


CHUNK, FILE = '"chunks": [[[0, 0], [6, 8]', '"name": "rank-00000.safetensors"'
SECOND: dict[str, tuple[str, str, str]] = {  # what is replaced, by what, and what is said
    "brackets": ('"step": 2, "data"', f'"step": {DEEP}, "data"', ", line 2: it nests too deep"),
    "NaN": ('"step": 2, "data"', '"step": Infinity, "data"', ", line 2: 'Infinity' is no finite number"),
    "twice": ('"step": 2, "data"', '"step": 2, "step": 3, "data"', ", line 2: the key 'step' is there twice"),
    "no JSON": ('"torch": ', '"torch"; ', ", line 2, column 9: Expecting ':' delimiter"),
    "deep": ('"step": 2, "data"', f'"step": {"[" * 200}{"]" * 200}, "data"',
             " contradicts itself: the state nests 201 deep, and 100 is the most"),
    "a chunk "
    "outside": (CHUNK, '"chunks": [[[7, 0], [6, 8]',
                " contradicts itself: a chunk of 'model/up.weight' is outside of it, or of rank-00000.safetensors"),
    "a chunk "
    "before": (CHUNK, '"chunks": [[[-1, 0], [6, 8]',
               " contradicts itself: a chunk of 'model/up.weight' has -1 where a count belongs"),
    "a "
    "fraction": (CHUNK, '"chunks": [[[0.0, 0], [6, 8]',
                 " contradicts itself: a chunk of 'model/up.weight' has 0.0 where a count belongs"),
    "not all of "
    "it": (CHUNK, '"chunks": [[[0, 0], [5, 8]',
           " contradicts itself: the chunks of 'model/up.weight' are not all of it"),
    "an overlap": (CHUNK, '"chunks": [[[1, 0], [6, 8]', " contradicts itself: two chunks of 'model/up.weight' overlap"),
    "a huge "
    "number": (CHUNK, f'"chunks": [[[{"9" * 400}, 0], [6, 8]',
               " contradicts itself: a chunk of 'model/up.weight' is outside of it, or of rank-00000.safetensors"),
    "a file "
    "elsewhere": (FILE, '"name": "../../rank-00000.safetensors"',
                  " contradicts itself: '../../rank-00000.safetensors' is no name of a file in the folder"),
    "a file at the "
    "root": (FILE, '"name": "/etc/passwd"', " contradicts itself: '/etc/passwd' is no name of a file in the folder"),
    "a long "
    "name": (FILE, f'"name": "{"a" * 5000}"', f" contradicts itself: '{'a' * 39}… is no name of a file in the folder"),
    "a zero byte": (FILE, '"name": "a\\u0000"', " contradicts itself: 'a\\x00' is no name of a file in the folder"),
    "half a pair": (FILE, '"name": "\\ud800"', " contradicts itself: '\\ud800' is no name of a file in the folder"),
    "no file of "
    "it": (FILE, '"name": "rank-00009.safetensors"',
           " contradicts itself: 'rank-00000.safetensors' is missing, or unknown"),
    "a file twice": (FILE, '"name": "rank-00001.safetensors"', " contradicts itself: a file is there twice"),
    "a size": ('"crc32": ', '"crc32": -', " contradicts itself: the CRC-32 of rank-00000.safetensors has -"),
    "a dtype": ('"dtype": "BF16"', '"dtype": "BF17"', " contradicts itself: 'BF17' is missing, or unknown"),
    "a kind": ('{"$tuple": [0.9', '{"$tuples": [0.9', " contradicts itself: '$tuples' is missing, or unknown"),
    "a "
    "tensor": ('{"$tensor": "model/few"}', '{"$tensor": "model/fow"}',
               " contradicts itself: the state has the tensor 'model/fow', and tensors has not"),
    "no tensor": ('{"$tensor": "model/few"}', '{"$tensor": [1]}', " contradicts itself: "),
    "an "
    "object": ('"step": 2, "data"', '"step": {"$array": ["|O", [1], "AAAAAAAAAAA="]}, "data"',
               " contradicts itself: an array of |O is no array of numbers"),
    "a huge "
    "array": ('"step": 2, "data"', f'"step": {{"$array": ["<f4", [{"9" * 40}], "AAAA"]}}, "data"',
              " contradicts itself: "),
    "no data": ('"step": 2, "data"', '"step": {"$bytes": 3}, "data"', " contradicts itself: "),
    "nothing": ('"torch": ', '"torhc": ', " contradicts itself: 'torch' is missing, or unknown"),
}  # fmt: skip


@pytest.mark.parametrize("case", SECOND)
def test_a_second_line_that_is_hostile(two: Path, case: str) -> None:
    """Signed as if it had been written so."""
    path = two / "checkpoint-000002" / manifest.NAME
    old, new, said = SECOND[case]
    body = path.read_text().partition("\n")[2].removesuffix("\n")
    assert old in body
    assert refused(path, signed(body.replace(old, new, 1))).startswith(f"DamageError: {path}{said}")


LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=3),
    st.sampled_from(["rank-00000.safetensors", "F32", "$tensor", "<f4", "/", "..", "\x00"]),
)  # fmt: skip
INNER = st.one_of(LEAF, st.lists(LEAF, max_size=3))
KEY = st.sampled_from([*values.DECODED, "$tensor", "name", "a"])
JSON = st.one_of(INNER, st.lists(INNER, max_size=3), st.dictionaries(KEY, INNER, max_size=2))


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each list or dict of a tree with each of its keys."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def test_any_value_that_is_replaced_is_refused_or_read(two: Path) -> None:
    """Whoever has written a manifest: what is raised is an error of ours."""
    path = two / "checkpoint-000002" / manifest.NAME
    body = path.read_text().partition("\n")[2]
    count = len(list(places(json.loads(body))))
    outcomes = set()

    @settings(max_examples=200, deadline=None)
    @given(at=st.integers(0, count - 1), value=JSON)
    def replace(at: int, value: Any) -> None:
        changed_body = json.loads(body)
        holder, key = list(places(changed_body))[at]
        holder[key] = value
        try:
            read = parsing.parse(signed(json.dumps(changed_body)), path)
        except CheckpointError as error:
            assert str(error).startswith(f"{path} contradicts itself: ")
            outcomes.add("refused")
            return
        outcomes.add("read")
        list(values.leaves(read.tree)), list(values.names(read.tree))

    replace()
    assert outcomes == {"refused", "read"}


def test_what_nests_too_deep_is_not_saved(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    for value in (endless, deep):
        with pytest.raises(
            ValueError, match=r"^the state nests more than 100 deep, or holds itself; save a flatter one$"
        ):
            checkpoint.save(tmp_path / "new", {"a": value})
    assert not (tmp_path / "new").exists()
