"""Order the rows of a dataset in each epoch: the same order on all ranks of all meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from autopar.data.place import WHOLE, Place
from autopar.data.rows import Row
from autopar.data.seeding import SEEDS


@dataclass
class Order:
    """The rows of each batch of an epoch, of which one rank takes its piece. A batch sampler of ``DataLoader``.

    Epoch ``e`` is shuffled by a generator with the seed ``seed + e``, as by torch's ``DistributedSampler``.

    Attributes:
        rows: the number of rows of the dataset.
        batch_size: the rows of a global batch.
        drop_last: whether a last batch with fewer rows is left out.
        place: the rank's piece of each batch.
        epoch, row: the epoch, and the first row that is not yet taken, in the order of the epoch.
    """

    rows: int
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    place: Place = WHOLE
    epoch: int = field(default=0, init=False)
    row: int = field(default=0, init=False)

    @property
    def end(self) -> int:
        """The row after the last that an epoch takes."""
        return self.rows - self.rows % self.batch_size if self.drop_last else self.rows

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return -(-self.end // self.batch_size)

    def after(self, row: int) -> int:
        """Return the row after a batch that begins with ``row``."""
        return min(row + self.batch_size, self.end)

    def __iter__(self) -> Iterator[list[Row]]:
        """Yield the rows of this rank in each batch, from the present position on.

        Where a batch has no row for this rank, a row of it comes that is not counted.
        """
        order = self._order()
        start = self.row
        while start < self.end:
            # the last batch of an epoch that began at another batch size may be cut by the end
            batch = order[start : self.after(start)]
            first, stop = self.place.of(len(batch))
            if first < stop:
                yield [Row(self.epoch, int(index)) for index in batch[first:stop]]
            else:
                yield [Row(self.epoch, int(batch[0]), counts=False)]
            start = self.after(start)

    def _order(self) -> torch.Tensor | range:
        if not self.shuffle:
            return range(self.rows)
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed((self.seed + self.epoch) % SEEDS))
