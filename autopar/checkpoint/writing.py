"""Implement the save planner and the storage writer of ``torch.distributed.checkpoint``.

torch decides which rank writes a piece that several ranks hold, and it sends results and failures between ranks. A rank
writes its chunks to one file of safetensors, a few MiB at a time.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autopar.checkpoint import files
from autopar.checkpoint.folder import abandon, begin, check_place, finish, finished_name, tidy
from autopar.checkpoint.manifest import DTYPES, Chunk, Manifest, StoredFile, StoredTensor
from autopar.checkpoint.pieces import Piece, stretches
from autopar.checkpoint.values import Tree
from autopar.errors import CheckpointError


class WritePlanner(DefaultSavePlanner):
    """Offers each piece of this rank; if several ranks have a piece, torch's planner chooses one of them.

    Args:
        tensors: the tensors of the state, by name.
        pieces: the pieces of each tensor on this rank.
        values: reads the values of a piece when it is written, if they are not in memory before.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, list[Piece]],
                 values: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:  # fmt: skip
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._pieces, self._values = tensors, pieces, values
        self._data: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, pieces in self._pieces.items():
            tensor = self._tensors[name]
            for piece in pieces:
                index = MetadataIndex(name, piece.start)
                chunk = ChunkStorageMetadata(torch.Size(piece.start), piece.data.shape)
                data = TensorWriteData(chunk, TensorProperties(tensor.dtype), tensor.shape)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._data[index] = piece.data
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        piece = self._data[index]
        return piece if self._values is None else self._values(piece)


class Writer(StorageWriter):
    """Writes a checkpoint into a folder of checkpoints.

    Args:
        folder: the folder of the checkpoints.
        tree: the state without its tensors.
        keep: how many complete checkpoints are kept; ``None``: all.

    Attributes:
        path: the path of the new checkpoint, when it is complete.
    """

    def __init__(self, folder: Path, tree: Tree, keep: int | None) -> None:
        self._folder, self._tree, self._keep = folder, tree, keep
        self._place: Path | None = None  # the temporary folder, on the rank that made it
        self.path = folder

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the temporary folder, and name a file in it for each rank."""
        with _remedy():
            self._place = begin(self._folder)
        return [
            replace(plan, storage_data=str(self._place / f"rank-{rank:05}.safetensors"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        path = Path(plan.storage_data)
        self.path = finished_name(path.parent)
        future: Future[list[WriteResult]] = Future()
        try:
            future.set_result(_write(path, plan.items, planner) if plan.items else [])
        except FileNotFoundError as error:
            check_place(path.parent)
            raise CheckpointError(
                f"{path} could not be written: {error}; let all ranks have the same folder, on a file system that "
                f"they share"
            ) from error
        except Exception as error:  # is sent to other ranks, which may not know its class
            advice = f"; {files.remedy(error)}" if isinstance(error, OSError) else ""
            raise CheckpointError(f"{path} could not be written: {error}{advice}") from error
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._place is not None
        manifest = _manifest(self._tree, metadata, [result for of_rank in results for result in of_rank])
        with _remedy():
            path = finish(self._place, manifest)
        tidy(path, self._keep)

    def abandon(self) -> None:
        """Remove the unfinished checkpoint after a failure; called on all ranks."""
        if self._place is not None:
            abandon(self._place)


@contextmanager
def _remedy() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error}; {files.remedy(error)}") from error


def _manifest(tree: Tree, metadata: Metadata, results: list[WriteResult]) -> Manifest:
    written = {result.index: result.storage_data for result in results}
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        chunks = []
        for chunk in tensor.chunks:
            file, begin = written[MetadataIndex(name, chunk.offsets)]
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file.name, begin))
        tensors[name] = StoredTensor(tensor.properties.dtype, tuple(tensor.size), tuple(chunks))
    stored = {file.name: file for file, _ in written.values()}
    return Manifest(tree, tensors, tuple(stored[name] for name in sorted(stored)))


def _write(path: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """Write chunks to a file of safetensors, and force it to disk; return the file and the first byte of each chunk."""
    # so that each chunk begins at a multiple of its dtype's width
    items = sorted(items, key=lambda item: -_data(item).properties.dtype.itemsize)
    header, begins = _header(items)
    checksum = size = 0
    with files.create(path) as file:
        for block in _blocks(header, items, planner):
            files.append(file, block)
            checksum, size = zlib.crc32(block, checksum), size + len(block)
        files.force(file)
    stored = StoredFile(path.name, size, checksum)
    return [WriteResult(item.index, _bytes(item), (stored, begin)) for item, begin in zip(items, begins, strict=True)]


def _header(items: list[WriteItem]) -> tuple[bytes, list[int]]:
    """Return the header of a file of safetensors, and the position of the first byte of each chunk.

    The header is the length of the rest in eight bytes, and names, dtypes, shapes and positions as JSON, padded to a
    multiple of eight.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for item in items:
        data = _data(item)
        box = ",".join(f"{a}:{a + n}" for a, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
        name = item.index.fqn if data.chunk.sizes == data.size else f"{item.index.fqn}[{box}]"
        end = ends[-1] + _bytes(item)
        entries[name] = {
            "dtype": DTYPES[data.properties.dtype],
            "shape": list(data.chunk.sizes),
            "data_offsets": [ends[-1], end],
        }
        ends.append(end)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + begin for begin in ends[:-1]]


def _blocks(header: bytes, items: list[WriteItem], planner: SavePlanner) -> Iterator[bytes | memoryview]:
    yield header
    for item in items:
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor)
        sizes = tuple(data.shape)
        for stretch in stretches(sizes, (0,) * len(sizes), sizes, data.element_size()):
            block = data[stretch.target].resolve_conj().resolve_neg().to("cpu").contiguous()
            yield block.reshape(-1).view(torch.uint8).numpy().data


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _bytes(item: WriteItem) -> int:
    data = _data(item)
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
