"""Iterate over a stream of rows without numbers: each rank reads the whole stream, and takes its rows of each batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from autopar.data.loader import Compare, ShardedLoader, checked_fields
from autopar.data.rows import Collate
from autopar.data.seeded_stream import TellingCollate, seeded


class StreamLoader(ShardedLoader):
    """The batches of an ``IterableDataset``, with the position that torchdata's ``StatefulDataLoader`` keeps."""

    def __init__(
        self, dataset: IterableDataset[Any], seed: int | None, collate: Collate, options: Mapping[str, Any],
        compare: Compare | None,
    ) -> None:  # fmt: skip
        self._stream = seeded(dataset, seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)  # torchdata 0.11 on torch 2.13
            self.loader = _stateful_loader()(self._stream, collate_fn=TellingCollate(collate), **options)
        self._compare = compare
        self._position: Mapping[str, Any] | None = None  # of the stream, where it was loaded
        self.set_epoch(0)

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        loaded = self._position is not None
        stream = self._position if loaded else self.loader.state_dict() if self._taken else None
        return {**self._data(), "epoch": self.epoch, "batches": self._taken, "stream": stream}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checked_fields(state, self._data())
        self.set_epoch(state["epoch"])
        if state.get("stream") is not None:
            self._position, self._taken = state["stream"], state["batches"]

    @property
    def batch_size(self) -> int:
        size: int = self.loader.batch_size
        return size

    def _data(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "num_workers": self.loader.num_workers}

    def _batches(self) -> Iterator[Any]:
        if self._position is not None:
            self.loader.load_state_dict(dict(self._position))
            self._position = None
        for digest, batch in self.loader:
            self._taken += 1
            if digest and self._compare is not None:
                self._compare(
                    f"take batch {self._taken} of a stream, whose rows have the digest {digest}: each rank reads the "
                    f"whole stream, so it must have one order on all ranks"
                )
            yield batch

    def _rewind(self) -> None:
        self._taken, self._position = 0, None
        self._stream.set_epoch(self.epoch)
        if hasattr(self._stream.dataset, "set_epoch"):  # as that of Hugging Face's datasets, which shuffle by it
            self._stream.dataset.set_epoch(self.epoch)

    def _described(self) -> str:
        return f"a stream in batches of {self.batch_size}, from batch {self._taken} of epoch {self.epoch} on"


def _stateful_loader() -> Any:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise ImportError(
            "an IterableDataset needs torchdata, which keeps the position in its stream: pip install 'autopar[data]'"
        ) from None
    return StatefulDataLoader
