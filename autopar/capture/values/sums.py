"""Let sums of rows wait until somebody reads them, and compute those of all experts in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.provenance import Recorder
from autopar.capture.values.later import Evaluator, Later
from autopar.torch_private import storage_of


@dataclass(eq=False)
class Sum:
    """One sum that waits.

    Attributes:
        into: the tensor that it is added to.
        dim: the dim of the rows.
        value: the sum.
        rows: how many rows are computed for it.
        choices: the number of positions of the mask.
        under: the conditions that hold where it is added.
    """

    into: torch.Tensor
    dim: int
    size: int
    value: Later
    rows: int
    choices: int
    line: str
    under: tuple[Any, ...] = ()


class Sums:
    """The sums that wait for somebody who reads them."""

    def __init__(self, evaluator: Evaluator, histories: Mapping[torch.Tensor, Later], recorder: Recorder) -> None:
        self.evaluator, self.histories, self.recorder = evaluator, histories, recorder
        self.waiting: list[Sum] = []

    def add(self, one: Sum) -> None:
        if any(other.into is not one.into for other in self.waiting):
            self.finish_all()
        self.waiting.append(one)

    def drop(self, condition: Any) -> None:
        """Leave out the sums under a condition that cannot hold."""
        self.waiting = [one for one in self.waiting if condition not in one.under]

    def finish(self, leaves: Sequence[Any], but: Any = None) -> None:
        """Compute the sums into tensors that share memory with one of these, except with ``but`` itself."""
        if self.waiting:
            storage = storage_of(self.waiting[0].into)
            if any(isinstance(x, torch.Tensor) and x is not but and storage_of(x) == storage for x in leaves):
                self.finish_all()

    def finish_all(self) -> None:
        sums, self.waiting = self.waiting, []
        if not sums:
            return
        batch = self.evaluator.together([one.value for one in sums], self.histories) if len(sums) > 1 else None
        alike = len({(one.dim, one.size) for one in sums}) == 1
        if batch is not None and alike:
            with self.recorder.placed(sums[0].value.place):
                _add_to(sums[0], batch.sum(0))
        else:
            for one in sums:
                value = self.evaluator.now(one.value)
                with self.recorder.placed(one.value.place):
                    _add_to(one, value)
        rows, choices = sum(one.rows for one in sums), max(one.choices for one in sums)
        self.recorder.note_rows(sums[0].line, len(sums), rows, choices)


def _add_to(one: Sum, value: torch.Tensor) -> None:
    into = one.into.narrow(one.dim, 0, one.size) if one.size != one.into.shape[one.dim] else one.into
    into.add_(value.to(into.dtype))
