"""Implement the load planner and the storage reader of ``torch.distributed.checkpoint``.

Its planning finds the part of each stored chunk that each piece of a rank needs. Nothing is unpickled: a file holds
numbers, and the manifest has their positions.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, ReadItem, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from autopar.checkpoint.files import fill
from autopar.checkpoint.manifest import Chunk, Manifest, StoredTensor
from autopar.checkpoint.pieces import STRETCH, Piece, Place, stretches
from autopar.errors import CheckpointError


class ReadPlanner(LoadPlanner):
    """Plans to read only the pieces of this rank.

    Args:
        pieces: name of a tensor → its pieces on this rank, which are filled.
    """

    def __init__(self, pieces: Mapping[str, list[Piece]]) -> None:
        self._pieces = pieces
        self._data: dict[MetadataIndex, torch.Tensor] = {}
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items = []
        for name, pieces in self._pieces.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [ChunkStorageMetadata(torch.Size(piece.start), piece.data.shape) for piece in pieces]
            items += create_read_items_for_chunk_list(name, stored, chunks)
            self._data |= {MetadataIndex(name, piece.start): piece.data for piece in pieces}
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("the files of a checkpoint hold only tensors; the rest is in its manifest")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        box = tuple(slice(a, a + n) for a, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self._data[read_item.dest_index][box]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class CheckpointReader(StorageReader):
    """Reads the files of one checkpoint, in stretches."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._checkpoint, self._manifest = checkpoint, manifest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        stored: dict[str, Any] = {}
        chunks: dict[MetadataIndex, Chunk] = {}
        for name, tensor in self._manifest.tensors.items():
            boxes = [ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.sizes)) for chunk in tensor.chunks]
            stored[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), boxes)
            chunks |= {MetadataIndex(name, chunk.start): chunk for chunk in tensor.chunks}
        return Metadata(stored, storage_data=chunks, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._chunks: dict[MetadataIndex, Chunk] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self._chunks[item.storage_index].file, []).append(item)
        buffer = bytearray(STRETCH)
        for name, items in per_file.items():
            path = self._checkpoint / name
            try:
                with open(path, "rb", buffering=0) as file:
                    for item in sorted(items, key=lambda item: self._chunks[item.storage_index].begin):
                        target = planner.resolve_tensor(item)
                        _read(
                            file,
                            self._chunks[item.storage_index],
                            tuple(item.storage_offsets),
                            tuple(item.lengths),
                            target,
                            buffer,
                        )
                        planner.commit_tensor(item, target)
            except Exception as error:  # is sent to other ranks, which may not know its class
                raise CheckpointError(f"{path} could not be read: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_tensor(checkpoint: Path, stored: StoredTensor) -> torch.Tensor:
    """Read a whole stored tensor into the memory of this process."""
    whole, buffer = torch.empty(stored.shape, dtype=stored.dtype), bytearray(STRETCH)
    for chunk in stored.chunks:
        with open(checkpoint / chunk.file, "rb", buffering=0) as file:
            box = tuple(slice(a, a + n) for a, n in zip(chunk.start, chunk.sizes, strict=True))
            _read(file, chunk, (0,) * len(chunk.sizes), chunk.sizes, whole[box], buffer)
    return whole


def _read(file: BinaryIO, chunk: Chunk, start: Place, lengths: Place, target: torch.Tensor, buffer: bytearray) -> None:
    """Fill ``target`` with the box at ``start`` of a chunk."""
    dtype = target.dtype
    for stretch in stretches(chunk.sizes, start, lengths, dtype.itemsize):
        count = math.prod(stretch.sizes)
        view = memoryview(buffer)[: count * dtype.itemsize]
        file.seek(chunk.begin + stretch.first * dtype.itemsize)
        fill(file, view)
        read = torch.frombuffer(buffer, dtype=dtype, count=count).reshape(stretch.sizes)
        target[stretch.target].copy_(read[stretch.wanted])
