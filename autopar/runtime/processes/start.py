"""Give each start of a job under torchrun a part of the launcher's store of its own.

The launcher's store outlives the ranks, and still has the addresses and the verdict of those before. Nothing that
torchrun says to a rank numbers the starts: a launcher counts only the restarts that its own ranks have caused, and one
that has come back begins at 0. So the first rank numbers them. Each other rank arrives under a name that was never
used, and the first one answers it.
"""

from __future__ import annotations

import time
import uuid

from torch import distributed

PREFIX = "autopar/starts"
PAUSE = 0.02  # seconds between two looks of the first rank


def store_of_start(store: distributed.Store, rank: int, ranks: int, patience: float) -> distributed.Store:
    """Return the part of a store that the ranks of this start share. All ranks call it.

    Args:
        store: that of the launcher, which earlier starts have used.
        patience: seconds that the first rank waits for the others, which then wait in vain.
    """
    if rank == 0:
        number = store.add(PREFIX, 1)
        _answer(store, number, ranks, time.monotonic() + patience)
    else:
        own = uuid.uuid4().hex
        store.set(f"{PREFIX}/arrived/{rank}", own)
        number = int(store.get(f"{PREFIX}/number of/{own}"))  # it waits
        store.set(f"{PREFIX}/{number}/joined/{rank}", "")
    return distributed.PrefixStore(f"start {number}", store)


def _answer(store: distributed.Store, number: int, ranks: int, end: float) -> None:
    """Answer all ranks until each has joined; names that ranks of earlier starts have left are answered, too."""
    left = list(range(1, ranks))
    while left and time.monotonic() < end:
        left = [rank for rank in left if not store.check([f"{PREFIX}/{number}/joined/{rank}"])]
        for rank in left:
            if store.check([f"{PREFIX}/arrived/{rank}"]):
                name = store.get(f"{PREFIX}/arrived/{rank}").decode()
                store.set(f"{PREFIX}/number of/{name}", str(number))
        if left:
            time.sleep(PAUSE)
