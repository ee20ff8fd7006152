"""Parse a manifest from any source: the result is consistent, and anything else is an error with its position.

The first line has a SHA-256 of the second, which detects flipped bits. The further checks are for manifests that were
made to do harm: that nest without end, name files elsewhere, or have chunks that overlap.
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
from autopar.checkpoint.values import DEPTH, decode_state, depth_of, tensors_in
from autopar.errors import CheckpointError

FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # a file name that cannot lead out of the folder
DIGITS = 1000  # the most digits of a number; Python reads no more than some thousands
SHOWN = 40  # characters of a wrong value that an error quotes


def parse(data: bytes, path: Path) -> Manifest:
    """Read a manifest; ``path`` is for errors.

    Raises:
        CheckpointError: it is no manifest, has a newer version, or has changed since it was written.
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
            f"{path} has version {_shown(version)} of the format, and this autopar reads up to {VERSION}; load it "
            f"with the autopar that wrote it, or a newer one"
        )
    body = body.removesuffix(b"\n")
    if hashlib.sha256(body).hexdigest() != head.get("sha256"):
        raise DamageError.changed(path, "its SHA-256 differs")
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
    """Parse a line of JSON; refuse what ``json.dumps`` would not write.

    Raises:
        DamageError: the line is malformed; names the line and, if the parser knows it, the column.
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
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {_shown(next(key for key in keys if keys.count(key) > 1))} is there twice")
    return result


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{_shown(text)} is no finite number")
    return value


# -- contents -----------------------------------------------------------------------------------------------------


def _checked(body: Any) -> Manifest:
    """Build a manifest; ``ValueError``, ``KeyError`` and the like if its parts are not consistent."""
    body = _kind(dict, body, "line 2")
    depth = depth_of(body["state"])
    if depth > DEPTH:
        raise ValueError(f"the state nests {depth} deep, and {DEPTH} is the most")
    files = {file.name: file for file in map(_file, _kind(list, body["files"], "files"))}
    if len(files) < len(body["files"]):
        raise ValueError("a file is there twice")
    tensors = {name: _tensor(name, stored, files) for name, stored in _kind(dict, body["tensors"], "tensors").items()}
    decode_state(body["state"], {})  # raises if the state cannot be decoded
    if lost := next((name for name in tensors_in(body["state"]) if name not in tensors), None):
        raise ValueError(f"the state has the tensor {_shown(lost)}, and tensors has not")
    return Manifest(body["state"], tensors, tuple(files.values()), _kind(str, body["torch"], "torch"))


def _file(value: Any) -> StoredFile:
    stored = _kind(dict, value, "a file")
    name = _kind(str, stored["name"], "the name of a file")
    if not FILE.fullmatch(name):
        raise ValueError(f"{_shown(name)} is no name of a file in the folder")
    return StoredFile(
        name, _count(stored["bytes"], f"the size of {name}"), _count(stored["crc32"], f"the CRC-32 of {name}")
    )


def _tensor(name: str, value: Any, files: dict[str, StoredFile]) -> StoredTensor:
    stored = _kind(dict, value, f"the tensor {_shown(name)}")
    dtype, shape = (
        NAMED[_kind(str, stored["dtype"], f"the dtype of {_shown(name)}")],
        _counts(stored["shape"], f"the shape of {_shown(name)}"),
    )
    chunks = []
    for fields in _kind(list, stored["chunks"], f"the chunks of {_shown(name)}"):
        start, sizes, file, begin = _kind(list, fields, f"a chunk of {_shown(name)}")
        subject = f"a chunk of {_shown(name)}"
        chunk = Chunk(
            _counts(start, subject), _counts(sizes, subject), _kind(str, file, subject), _count(begin, subject)
        )
        inside = len(start) == len(sizes) == len(shape) and all(
            a + n <= size for a, n, size in zip(chunk.start, chunk.sizes, shape, strict=True)
        )
        if not (inside and chunk.begin <= files[chunk.file].bytes - math.prod(chunk.sizes) * dtype.itemsize):
            raise ValueError(f"a chunk of {_shown(name)} is outside of it, or of {chunk.file}")
        chunks.append(chunk)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {_shown(name)} are not all of it")
    if _overlap(chunks):
        raise ValueError(f"two chunks of {_shown(name)} overlap")
    return StoredTensor(dtype, shape, tuple(chunks))


def _overlap(chunks: Iterable[Chunk]) -> bool:
    """Return whether two chunks share an element.

    Chunks are sorted by the dim with the most distinct starts; only those that meet in it are compared.
    """
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    dims = range(len(filled[0].start)) if filled else ()
    dim = max(dims, key=lambda d: len({chunk.start[d] for chunk in filled}), default=None)
    if dim is None:
        return len(filled) > 1
    met: list[Chunk] = []
    for chunk in sorted(filled, key=lambda chunk: chunk.start[dim]):
        met = [other for other in met if other.start[dim] + other.sizes[dim] > chunk.start[dim]]
        if any(
            all(
                a < b + m and b < a + n
                for a, n, b, m in zip(chunk.start, chunk.sizes, other.start, other.sizes, strict=True)
            )
            for other in met
        ):
            return True
        met.append(chunk)
    return False


def _kind(kind: Callable[..., Any], value: Any, subject: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{subject} is {_shown(value)}, and no {kind.__name__}")
    return value


def _count(value: Any, subject: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{subject} has {_shown(value)} where a count belongs")
    return value


def _counts(value: Any, subject: str) -> tuple[int, ...]:
    return tuple(_count(count, subject) for count in _kind(list, value, subject))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
