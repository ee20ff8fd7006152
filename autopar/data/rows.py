"""Fetch rows so that what is random in them depends on the row alone, and put the rows of a rank into a batch.

A dataset that augments its rows draws from global generators. Which process fetches a row depends on the mesh and on
the number of workers. So before each row the generators are seeded by (seed, epoch, row).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, TensorDataset

from autopar.data.place import Place
from autopar.data.seeding import generators_kept, seed_generators


class Row(NamedTuple):
    """A row that is to be fetched. ``counts``: whether it is the rank's; else its batch has the row's shapes alone."""

    epoch: int
    number: int
    counts: bool = True


class Pattern(NamedTuple):
    """A row that only shows the shapes of a batch without rows."""

    row: Any


class Rows(Dataset[Any]):
    """The rows of a dataset by ``Row``.

    Args:
        dataset: a dataset with ``__getitem__``.
        seed: seeds what is random in a row; ``None`` leaves the generators alone.
    """

    def __init__(self, dataset: Any, seed: int | None) -> None:
        self.dataset = dataset
        self.seed = None if type(dataset) is TensorDataset else seed  # it draws nothing

    def __getitems__(self, rows: Sequence[Row]) -> list[Any]:
        """Return the rows of a batch; ``DataLoader`` calls it."""
        return [row if wanted.counts else Pattern(row) for row, wanted in zip(self._fetch(rows), rows, strict=True)]

    def _fetch(self, rows: Sequence[Row]) -> list[Any]:
        if self.seed is None:
            if hasattr(self.dataset, "__getitems__"):
                return list(self.dataset.__getitems__([row.number for row in rows]))
            return [self.dataset[row.number] for row in rows]
        fetched = []
        with generators_kept():
            for row in rows:
                seed_generators(self.seed, row.epoch, row.number)
                fetched.append(self.dataset[row.number])
        return fetched


@dataclass(frozen=True)
class Collate:
    """Puts rows into a batch: all that it is given, or the piece of a rank.

    Attributes:
        collate: makes a batch of a list of rows.
        place: the rank's piece of the rows; ``None`` if all of them are the rank's.
    """

    collate: Callable[[list[Any]], Any]
    place: Place | None = None

    def __call__(self, rows: list[Any]) -> Any:
        own = rows
        if self.place is not None:
            first, stop = self.place.of(len(rows))
            own = rows[first:stop] or [Pattern(rows[0])]
        if isinstance(own[0], Pattern):
            return without_rows(self.collate([own[0].row]))
        return self.collate(own)


def without_rows(batch: Any) -> Any:
    """Return a batch of one row without this row: tensors of length 1 in dim 0, and lists of texts, become empty."""
    if isinstance(batch, torch.Tensor):
        return batch[:0] if batch.dim() and len(batch) == 1 else batch
    if isinstance(batch, Mapping):
        emptied = {key: without_rows(value) for key, value in batch.items()}
        return emptied if type(batch) is dict else _like(batch, emptied)
    if isinstance(batch, (list, tuple)):
        if batch and all(isinstance(value, (str, bytes)) for value in batch):
            return type(batch)()
        values = [without_rows(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the batch's own class, such as a ``BatchEncoding`` of transformers."""
    made: Any = batch.copy() if hasattr(batch, "copy") else type(batch)()
    made.update(values)
    return made
