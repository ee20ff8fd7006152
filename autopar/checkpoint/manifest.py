"""The manifest of a checkpoint: one JSON file that says all of it but the numbers.

It has the state without its tensors; of each tensor dtype, shape and chunks, which are boxes of it that lie somewhere in a
file; and of each file its size and its CRC-32. Over all that goes a SHA-256, which is checked before anything is believed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from autopar.checkpoint.values import Tree
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


class DamageError(CheckpointError):
    """A checkpoint that is not as it was written. ``what`` says how, without the remedy."""

    def __init__(self, what: str) -> None:
        super().__init__(what)  # which is all that goes to other ranks
        self.what = what

    def __str__(self) -> str:
        return f"{self.what}; load another checkpoint, by its own path"

    @classmethod
    def changed(cls, path: Path, how: str) -> DamageError:
        """Of a file whose bytes are others."""
        return cls(f"{path} has been changed since it was written: {how}")


def what_of(error: CheckpointError) -> str:
    """What is wrong, without the remedy of damage."""
    return error.what if isinstance(error, DamageError) else str(error)


def described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """``float32 [8 4]``."""
    return f"{str(dtype).removeprefix('torch.')} [{' '.join(map(str, shape))}]"
