"""Datasets whose rows say which they are: in order, at random, and as streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbered(Dataset[Any]):
    """Row ``k`` has the number ``k``, a text, and a value of the whole row."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": torch.full((3,), k, dtype=torch.float64), "k": k, "text": f"row {k}"}


class Augmented(Numbered):
    """Draws from all three generators."""

    def __getitem__(self, k: int) -> dict[str, Any]:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return {"k": k, "drawn": torch.tensor(drawn, dtype=torch.float64)}


class Stream(IterableDataset[int]):
    """The numbers from 0 on; each worker takes its own."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from range(start, self.rows, step)


class StatefulStream(Stream):
    """Keeps its own position, and begins with the number of its epoch."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.next, self.epoch = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.next < self.rows:
            self.next += 1
            yield 1000 * self.epoch + self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Shuffled(Stream):
    """Shuffles the numbers by all three generators, and draws for each row."""

    def __iter__(self) -> Iterator[Any]:
        rows = [*super().__iter__()]
        random.shuffle(rows)
        rows = [rows[k] for k in torch.randperm(len(rows))]
        np.random.shuffle(rows)
        for row in rows:
            yield {"k": row, "drawn": torch.rand((), dtype=torch.float64)}


class Unseeded(Stream):
    """Shuffles the numbers by a generator of its own."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__(rows)
        self.generator = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        rows = [*super().__iter__()]
        self.generator.shuffle(rows)
        yield from rows
