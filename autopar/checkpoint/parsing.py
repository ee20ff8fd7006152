"""Parse a manifest, whoever may have written it: what comes out fits together, and what does not is an error with its place.

Its first line has a SHA-256 of the second, so a bit that has flipped is found there. What is checked behind it is for a
manifest that was made to do harm: one that nests without end, names files elsewhere, or has chunks that overlap.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from autopar.checkpoint.manifest import FORMAT, NAMED, VERSION, Chunk, DamageError, Manifest, StoredFile, StoredTensor
from autopar.checkpoint.values import DEPTH, depth_of, put_together, tensors_in
from autopar.errors import CheckpointError

FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # a name in the folder, and no way out of it
DIGITS = 1000  # of a number: Python reads no more than some thousands
SHOWN = 40  # characters of what is wrong


def parse(data: bytes, path: Path) -> Manifest:
    """Read a manifest; ``path`` is for errors.

    Raises:
        CheckpointError: it is none, of a newer version, or not as it was written.
    """
    first, _, body = data.partition(b"\n")
    try:
        head = _json(first, path, 1)
    except DamageError as error:
        raise _none(path, error.what.removeprefix(f"{path}, ")) from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise _none(path, f'line 1: it has no "format": "{FORMAT}"')
    if type(version := head.get("version")) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{path} has version {_shown(version)} of the format, and this autopar reads up to {VERSION}; load it with the autopar that wrote it, or a newer one"
        )
    body = body.removesuffix(b"\n")
    if hashlib.sha256(body).hexdigest() != head.get("sha256"):
        raise DamageError.changed(path, "its SHA-256 is another")
    content = _json(body, path, 2)
    try:
        return _checked(content)
    except KeyError as error:
        raise _contradiction(path, f"{_shown(error.args[0])} is missing, or unknown") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _contradiction(path, str(error)) from error


def _none(path: Path, how: str) -> DamageError:
    return DamageError(f"{path} is no manifest of a checkpoint: {how}")


def _contradiction(path: Path, how: str) -> DamageError:
    return DamageError(f"{path} contradicts itself: {how}")


# -- JSON ---------------------------------------------------------------------------------------------------------


def _json(line: bytes, path: Path, number: int) -> Any:
    """What a line says; refused where JSON as ``json.dumps`` writes it would not say it.

    Raises:
        DamageError: with the line and, where the parser tells it, the column.
    """
    def refused(how: str, column: int | None = None) -> DamageError:
        return DamageError(f"{path}, line {number}{f', column {column}' if column else ''}: {how}")

    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise refused("it is not UTF-8", error.start + 1) from None
    try:
        return json.loads(text, object_pairs_hook=_keys, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except json.JSONDecodeError as error:
        raise refused(error.msg, error.colno) from None
    except RecursionError:
        raise refused("it nests too deep") from None
    except ValueError as error:
        raise refused(str(error)) from None


def _keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {_shown(next(key for key in keys if keys.count(key) > 1))} is there twice")
    return found


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{_shown(text)} is no finite number")
    return value


# -- what it says -------------------------------------------------------------------------------------------------


def _checked(body: Any) -> Manifest:
    """``ValueError``, ``KeyError`` and the like where it does not fit together."""
    body = _kind(dict, body, "line 2")
    depth = depth_of(body["state"])
    if depth > DEPTH:
        raise ValueError(f"the state nests {depth} deep, and {DEPTH} is the most")
    files = {one.name: one for one in map(_file, _kind(list, body["files"], "files"))}
    if len(files) < len(body["files"]):
        raise ValueError("a file is there twice")
    tensors = {name: _tensor(name, one, files) for name, one in _kind(dict, body["tensors"], "tensors").items()}
    put_together(body["state"], {})  # fails where it cannot be made
    if lost := next((name for name in tensors_in(body["state"]) if name not in tensors), None):
        raise ValueError(f"the state has the tensor {_shown(lost)}, and tensors has not")
    return Manifest(body["state"], tensors, tuple(files.values()), _kind(str, body["torch"], "torch"))


def _file(value: Any) -> StoredFile:
    stored = _kind(dict, value, "a file")
    name = _kind(str, stored["name"], "the name of a file")
    if not FILE.fullmatch(name):
        raise ValueError(f"{_shown(name)} is no name of a file in the folder")
    return StoredFile(name, _count(stored["bytes"], f"the size of {name}"), _count(stored["crc32"], f"the CRC-32 of {name}"))


def _tensor(name: str, value: Any, files: dict[str, StoredFile]) -> StoredTensor:
    stored = _kind(dict, value, f"the tensor {_shown(name)}")
    dtype, shape = NAMED[_kind(str, stored["dtype"], f"the dtype of {_shown(name)}")], _counts(stored["shape"], f"the shape of {_shown(name)}")
    chunks = []
    for one in _kind(list, stored["chunks"], f"the chunks of {_shown(name)}"):
        start, sizes, file, begin = _kind(list, one, f"a chunk of {_shown(name)}")
        what = f"a chunk of {_shown(name)}"
        chunk = Chunk(_counts(start, what), _counts(sizes, what), _kind(str, file, what), _count(begin, what))
        inside = len(start) == len(sizes) == len(shape) and all(a + n <= size for a, n, size in zip(chunk.start, chunk.sizes, shape, strict=True))
        if not (inside and chunk.begin <= files[chunk.file].bytes - math.prod(chunk.sizes) * dtype.itemsize):
            raise ValueError(f"a chunk of {_shown(name)} lies outside of it, or of {chunk.file}")
        chunks.append(chunk)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {_shown(name)} are not all of it")
    if _overlap(chunks):
        raise ValueError(f"two chunks of {_shown(name)} overlap")
    return StoredTensor(dtype, shape, tuple(chunks))


def _overlap(chunks: Iterable[Chunk]) -> bool:
    """Whether two chunks share an element. Compared are those that meet along the dim in which most begin at places of their own."""
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    dims = range(len(filled[0].start)) if filled else ()
    dim = max(dims, key=lambda d: len({chunk.start[d] for chunk in filled}), default=None)
    if dim is None:
        return len(filled) > 1
    met: list[Chunk] = []
    for chunk in sorted(filled, key=lambda one: one.start[dim]):
        met = [other for other in met if other.start[dim] + other.sizes[dim] > chunk.start[dim]]
        if any(all(a < b + m and b < a + n for a, n, b, m in zip(chunk.start, chunk.sizes, other.start, other.sizes, strict=True)) for other in met):
            return True
        met.append(chunk)
    return False


def _kind(kind: Callable[..., Any], value: Any, what: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{what} is {_shown(value)}, and no {kind.__name__}")  # type: ignore[attr-defined]
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{what} has {_shown(value)} where a count belongs")
    return value


def _counts(value: Any, what: str) -> tuple[int, ...]:
    return tuple(_count(one, what) for one in _kind(list, value, what))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
