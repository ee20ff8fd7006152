"""Read a stream so that what is random in it is the same on all ranks, and say whether they read the same rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from autopar.data.rows import Collate
from autopar.data.seeding import generators_kept, seed_generators

END = object()


class SeededStream(IterableDataset[Any]):
    """A stream whose generators are seeded before each row by (seed, epoch, worker, number of the row).

    So a stream that shuffles its rows by the global generators has the same order on all ranks.

    Attributes:
        dataset: the stream.
        epoch: the epoch. Workers that persist count their passes themselves.

    Args:
        seed: ``None`` leaves the generators alone.
    """

    def __init__(self, dataset: IterableDataset[Any], seed: int | None) -> None:
        self.dataset, self.seed = dataset, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.passes, self.number = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:
        if self.seed is None:
            yield from self.dataset
            return
        worker = get_worker_info()
        facts = self.seed, self.epoch, self.passes, 0 if worker is None else worker.id
        rows: Iterator[Any] | None = None
        while True:
            with generators_kept():
                seed_generators(*facts, self.number)
                rows = iter(self.dataset) if rows is None else rows
                row = next(rows, END)
            if row is END:
                break
            self.number += 1
            yield row
        self.number = 0
        self.passes += 1


class SizedStream(SeededStream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        sized: Any = self.dataset
        return len(sized)


class PlacedStream(SeededStream):
    """A stream that keeps its own position."""

    def state_dict(self) -> dict[str, Any]:
        stateful: Any = self.dataset
        return {"number": self.number, "passes": self.passes, "stream": stateful.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        stateful: Any = self.dataset
        self.number, self.passes = state["number"], state["passes"]
        stateful.load_state_dict(state["stream"])


class SizedPlacedStream(PlacedStream, SizedStream):
    """A stream that knows its length, and keeps its own position."""


def seeded(dataset: IterableDataset[Any], seed: int | None) -> SeededStream:
    """Return the stream with seeded generators. It can what the dataset can, for loaders ask for that."""
    kinds = {
        (False, False): SeededStream, (True, False): SizedStream,
        (False, True): PlacedStream, (True, True): SizedPlacedStream,
    }  # fmt: skip
    placed = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return kinds[hasattr(dataset, "__len__"), placed](dataset, seed)


# -- whether ranks read the same rows ---------------------------------------------------------------------------------


class Told(NamedTuple):
    """A batch, with a digest of all its rows; "" where none was made."""

    digest: str
    batch: Any


class TellingCollate:
    """Puts rows into the batch of a rank, and digests all of them: of each process the batches 1, 2, 4, 8, …"""

    def __init__(self, collate: Collate) -> None:
        self._collate, self._count = collate, 0

    def __call__(self, rows: list[Any]) -> Told:
        self._count += 1
        digest = digest_of(rows) if self._count & (self._count - 1) == 0 else ""
        return Told(digest, self._collate(rows))


def digest_of(value: Any) -> str:
    """Return a digest of tensors, arrays, numbers and texts, in lists and mappings; and of the classes of others."""
    digest = hashlib.blake2b(digest_size=8)
    _take(digest, value)
    return digest.hexdigest()


def _take(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor) and not value.is_sparse and not value.is_quantized:
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _take(digest, key)
            _take(digest, part)
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}".encode())
        for part in value:
            _take(digest, part)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        digest.update(f"{type(value).__name__}{value!r};".encode())
    else:
        digest.update(type(value).__qualname__.encode())
