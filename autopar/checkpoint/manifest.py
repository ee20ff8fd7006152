"""Describe a checkpoint by a manifest: one JSON file with everything but the elements of the tensors.

It has the state without its tensors; for each tensor its dtype, its shape and its chunks; a chunk is a box of the
tensor, stored at an offset in a file; and for each file its size and its CRC-32. A SHA-256 of all that is checked
before anything in it is used.
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

# dtype → its name in files of safetensors and in manifests
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
        name: its name in the folder of the checkpoint.
        bytes: its size.
        crc32: the CRC-32 of the whole file.
    """

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, whose elements are stored in row-major order.

    Attributes:
        start: the index in the tensor at which the box begins.
        sizes: the sizes of the box.
        file: the name of the file.
        begin: the position of its first byte in the file.
    """

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint; its chunks are disjoint and cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def __str__(self) -> str:
        return described(self.dtype, self.shape)


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        tree: the state, with ``{"$tensor": name}`` in the place of a tensor.
        tensors: name → tensor.
        files: the files that hold the tensors.
        torch: the version of torch that wrote it.
    """

    tree: Tree
    tensors: dict[str, StoredTensor]
    files: tuple[StoredFile, ...]
    torch: str = str(torch.__version__)

    def text(self) -> str:
        """Return the text of the file: a line with format, version and SHA-256, and a line with the contents."""
        body = json.dumps(
            {
                "torch": self.torch,
                "state": self.tree,
                "tensors": {
                    name: {
                        "dtype": DTYPES[tensor.dtype],
                        "shape": tensor.shape,
                        "chunks": [list(asdict(c).values()) for c in tensor.chunks],
                    }
                    for name, tensor in self.tensors.items()
                },
                "files": [asdict(file) for file in self.files],
            },
            allow_nan=False,
        )
        head = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(body.encode()).hexdigest()}
        return f"{json.dumps(head)}\n{body}\n"


class DamageError(CheckpointError):
    """A checkpoint that has changed since it was written. ``what`` describes the change, without the remedy."""

    def __init__(self, what: str) -> None:
        super().__init__(what)  # pickling sends only this to other ranks
        self.what = what

    def __str__(self) -> str:
        return f"{self.what}; load another checkpoint, by its own path"

    @classmethod
    def changed(cls, path: Path, how: str) -> DamageError:
        """Return the error for a file whose bytes have changed."""
        return cls(f"{path} is damaged: it has changed since it was written: {how}")


def problem_of(error: CheckpointError) -> str:
    """Return the text of an error, without the remedy that damage has."""
    return error.what if isinstance(error, DamageError) else str(error)


def described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Describe dtype and shape: ``float32 [8 4]``."""
    return f"{str(dtype).removeprefix('torch.')} [{' '.join(map(str, shape))}]"
