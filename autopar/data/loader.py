"""Iterate over the batches of a rank, and keep the position in the data, which is the same on all meshes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from autopar.data.order import Order
from autopar.errors import class_of, shown

Compare = Callable[[str], None]  # compares a call of this rank with those of the others


class ShardedLoader:
    """The batches of one rank. Made by ``sharded``.

    ``for batch in loader`` takes one epoch; the next loop takes the next epoch. After ``load_state_dict`` the first
    loop takes what is left of the epoch.

    Attributes:
        epoch: the epoch that the present loop takes, or else the next loop.
    """

    epoch: int
    _begun: bool  # a loop has begun, and its epoch has not been left
    _compare: Compare | None

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self.set_epoch(self.epoch + 1)  # the loop before this one was left early
        self._begun = True
        if self._compare is not None:
            self._compare(f"iterate over {self._described()}")
        yield from self._batches()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop begin with this epoch."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch {shown(epoch)} is not an integer ≥ 0")
        self.epoch, self._begun = epoch, False
        self._rewind()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of an epoch."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """The rows of a global batch."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position after the latest batch: the same on all ranks, and for loaders of all meshes."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position."""

    @abstractmethod
    def _batches(self) -> Iterator[Any]:
        """Iterate over what is left of the epoch."""

    @abstractmethod
    def _rewind(self) -> None:
        """Go to the beginning of the epoch."""

    @abstractmethod
    def _described(self) -> str:
        """Describe the data and the position, in words that ranks compare."""


def checked_fields(state: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a position in other data.

    Raises:
        TypeError: it is no mapping.
        ValueError: a field is missing or different; the error names all of them.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a position is what state_dict of a sharded loader returned, not {class_of(state)}")
    if missing := [name for name in (*wanted, "epoch") if name not in state]:
        raise ValueError(f"this is no position of a sharded loader: it has no {', '.join(missing)}")
    different = [
        f"{name} is {value}, and it was {state[name]}" for name, value in wanted.items() if state[name] != value
    ]
    if different:
        raise ValueError(
            f"the position belongs to other data: {'; '.join(different)}; make the loader as it was, or begin anew "
            f"without the position"
        )


class RowLoader(ShardedLoader):
    """The batches of a dataset whose rows have numbers."""

    def __init__(self, order: Order, loader: DataLoader[Any], compare: Compare | None) -> None:
        self.order, self.loader, self._compare = order, loader, compare
        self.set_epoch(0)

    def __len__(self) -> int:
        return len(self.order)

    @property
    def batch_size(self) -> int:
        return self.order.batch_size

    def state_dict(self) -> dict[str, Any]:
        return {**self._data(), "epoch": self.epoch, "row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checked_fields(state, self._data())
        row = state.get("row")
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row <= self.order.rows:
            raise ValueError(f"row {shown(row)} of the position is not between 0 and {self.order.rows}")
        self.set_epoch(state["epoch"])
        self._row = row

    def _data(self) -> dict[str, Any]:
        return {"rows": self.order.rows, "shuffle": self.order.shuffle, "seed": self.order.seed}

    def _batches(self) -> Iterator[Any]:
        self.order.epoch, self.order.row = self.epoch, self._row
        for batch in self.loader:
            self._row = self.order.after(self._row)
            yield batch

    def _rewind(self) -> None:
        self._row = 0

    def _described(self) -> str:
        order = self.order
        return (
            f"{order.rows} rows in batches of {order.batch_size}, {'shuffled' if order.shuffle else 'in order'} with "
            f"seed {order.seed}, from row {self._row} of epoch {self.epoch} on"
            + ", without a shorter last batch"
            * order.drop_last
        )
