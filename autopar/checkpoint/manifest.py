"""The manifest of a checkpoint: one JSON file that says all of it but the numbers.

It has the state without its tensors; of each tensor dtype, shape and chunks, which are boxes of it that lie somewhere in a
file; and of each file its size and its CRC-32. Over all that goes a SHA-256, which is checked before anything is believed.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.values import Tree, put_together
from autopar.errors import CheckpointError

NAME = "checkpoint.json"
FORMAT, VERSION = "autopar checkpoint", 1

# dtype → its name in files of safetensors, and here
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
NAMED = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class StoredFile:
    """A file of the checkpoint.

    Attributes:
        name: in the folder of the checkpoint.
        bytes: its size.
        crc32: of all of it.
    """

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its elements lie, in row-major order.

    Attributes:
        start: where the box begins in the tensor.
        sizes: of the box.
        file: its name.
        begin: the first byte in the file.
    """

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint; its chunks are disjoint, and all of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __str__(self) -> str:
        return described(self.dtype, self.shape)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is made of.

    Attributes:
        tree: the state, where ``{"$tensor": name}`` stands for a tensor.
        tensors: by name.
        files: that hold them.
        torch: the version of torch that wrote it.
    """

    tree: Tree
    tensors: dict[str, StoredTensor]
    files: tuple[StoredFile, ...]
    torch: str = str(torch.__version__)

    def text(self) -> str:
        """What is written: a line that says what it is, and all the rest as another."""
        body = json.dumps(
            {
                "torch": self.torch,
                "state": self.tree,
                "tensors": {name: {"dtype": DTYPES[one.dtype], "shape": one.shape, "chunks": [list(asdict(c).values()) for c in one.chunks]} for name, one in self.tensors.items()},
                "files": [asdict(file) for file in self.files],
            },
            allow_nan=False,
        )
        head = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(body.encode()).hexdigest()}
        return f"{json.dumps(head)}\n{body}\n"


def parse(text: str, path: Path) -> Manifest:
    """Read a manifest; ``path`` is for errors.

    Raises:
        CheckpointError: it is none, of a newer version, or not as it was written.
    """
    first, _, body = text.partition("\n")
    try:
        head = json.loads(first)
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of a checkpoint; load a folder that autopar.checkpoint.save has written")
    if type(version := head.get("version")) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(f"{path} has version {version} of the format, and this autopar reads up to {VERSION}; load it with the autopar that wrote it, or a newer one")
    if hashlib.sha256(body.removesuffix("\n").encode()).hexdigest() != head.get("sha256"):
        raise changed(path, "its SHA-256 is another")
    try:
        return _checked(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} contradicts itself: {type(error).__name__}: {error}; load another checkpoint") from error


def _checked(body: dict[str, Any]) -> Manifest:
    """``ValueError`` and the like where it does not fit together."""
    files = {one["name"]: StoredFile(**one) for one in body["files"]}
    tensors = {}
    for name, one in body["tensors"].items():
        dtype, shape = NAMED[one["dtype"]], tuple(one["shape"])
        chunks = tuple(Chunk(tuple(start), tuple(sizes), file, begin) for start, sizes, file, begin in one["chunks"])
        for chunk in chunks:
            inside = all(0 <= a <= a + n <= size for a, n, size in zip(chunk.start, chunk.sizes, shape, strict=True))
            if not (inside and 0 <= chunk.begin <= files[chunk.file].bytes - math.prod(chunk.sizes) * dtype.itemsize):
                raise ValueError(f"a chunk of {name} lies outside of it, or of {chunk.file}")
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
            raise ValueError(f"the chunks of {name} are not all of it")
        tensors[name] = StoredTensor(dtype, shape, chunks)
    if wrong := [name for name in files if Path(name).name != name]:
        raise ValueError(f"{wrong[0]} is no file of the folder")
    put_together(body["state"], {})  # fails where it cannot be made
    return Manifest(body["state"], tensors, tuple(files.values()), body["torch"])


def changed(path: Path, how: str) -> CheckpointError:
    """The error of a file that is not as it was written."""
    return CheckpointError(f"{path} has been changed since it was written: {how}; load another checkpoint, by its own path")


def described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """``float32 [8 4]``."""
    return f"{str(dtype).removeprefix('torch.')} [{' '.join(map(str, shape))}]"
