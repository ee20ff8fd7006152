"""Decide when transfers begin and end, in a table that all ranks of a host share.

A transfer is *ready* when all its members have issued it. Transfers take their links in the order in which they become
ready: a transfer begins as soon as the links of all its members are free, and occupies them for its price. The member
that issues last decides both times, so no central process is needed. Times are those of one clock of the host.

The table is a hash table with open addressing: a key is searched in the slots from its hash on, at most ``WINDOW`` of
them. The slot of a transfer is free again when all members have read the times. The slot of a link may be taken by
another link when its time is past.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

WORD = 8  # bytes
TRANSFERS, LINKS = 16384, 8192  # slots
WINDOW = 64  # slots in which a key is searched
FIELDS = ("key", "issued", "read")  # of a transfer, integers
TIMES = ("ready", "price", "begin", "end")  # of a transfer, in seconds
SIZE = WORD * ((len(FIELDS) + len(TIMES)) * TRANSFERS + 2 * LINKS)  # bytes of a table


class LinkTimes(NamedTuple):
    """When a transfer begins, and the earliest time at which it ends."""

    begin: float
    end: float


def key_of(*parts: Any) -> int:
    """Return the key of a transfer or a link: a hash that is the same in all processes, and not 0."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=WORD).digest(), "little") or 1


class LinkTable:
    """The transfers under way, and the times until which links are occupied.

    Args:
        buffer: ``SIZE`` bytes, all 0 before the first use; shared memory, if there are several processes.
        lock: makes a context in which no other process or thread uses the table.
        clock: returns the present time in seconds, the same in all processes.
    """

    def __init__(
        self, buffer: Any, lock: Callable[[], AbstractContextManager[Any]], clock: Callable[[], float]
    ) -> None:
        whole, at = memoryview(buffer)[:SIZE], 0

        def words(count: int, kind: Literal["Q", "d"]) -> Any:
            nonlocal at
            at += WORD * count
            return whole[at - WORD * count : at].cast(kind)

        self._keys, self._issued, self._read = (words(TRANSFERS, "Q") for _ in FIELDS)
        self._ready, self._price, self._begin, self._end = (words(TRANSFERS, "d") for _ in TIMES)
        self._link_keys, self._free_at = words(LINKS, "Q"), words(LINKS, "d")
        self._lock, self._clock = lock, clock

    def issue(self, key: int, members: int, links: Sequence[int], price: float, at: float | None = None) -> bool:
        """Note that one member has issued a transfer. The last one decides its times.

        Args:
            key: the transfer.
            members: how many members issue it.
            links: the keys of the links that it occupies.
            price: its seconds; the largest of all members counts.
            at: when the member issued it; by default now.

        Returns:
            Whether there was room in the table. If not, the table is unchanged.

        Raises:
            RuntimeError: more links are in use at once than the table has slots.
        """
        with self._lock():
            slot = self._find(key)
            if slot is None:
                return False
            now = self._clock()
            self._issued[slot] += 1
            self._price[slot] = max(self._price[slot], price)
            self._ready[slot] = max(self._ready[slot], now if at is None else at)
            if self._issued[slot] == members:
                self._decide(slot, links, now)
            return True

    def times(self, key: int, members: int) -> LinkTimes | None:
        """Return when a transfer begins and ends; ``None`` until all members have issued it.

        Each member may read the times once.
        """
        with self._lock():
            slot = self._find(key, make=False)
            if slot is None or self._issued[slot] < members:
                return None
            times = LinkTimes(self._begin[slot], self._end[slot])
            self._read[slot] += 1
            if self._read[slot] == members:
                self._keys[slot] = 0
            return times

    def _decide(self, slot: int, links: Sequence[int], now: float) -> None:
        taken = [self._link(link, now) for link in links]
        begin = max([self._ready[slot], *(self._free_at[link] for link in taken)])
        self._begin[slot], self._end[slot] = begin, begin + self._price[slot]
        for link in taken:
            self._free_at[link] = self._end[slot]

    def _find(self, key: int, make: bool = True) -> int | None:
        """Return the slot of a transfer, or a new slot; ``None`` if it has none and none is free."""
        first = key % (TRANSFERS - WINDOW)
        window = self._keys[first : first + WINDOW].tolist()
        if key in window:
            return first + window.index(key)
        if not make or 0 not in window:
            return None
        slot = first + window.index(0)
        self._keys[slot] = key
        self._issued[slot] = self._read[slot] = 0
        self._ready[slot] = self._price[slot] = self._begin[slot] = self._end[slot] = 0.0
        return slot

    def _link(self, key: int, now: float) -> int:
        """Return the slot of a link; a new link takes the slot of an idle one."""
        first = key % (LINKS - WINDOW)
        window = self._link_keys[first : first + WINDOW].tolist()
        if key in window:
            return first + window.index(key)
        idle = min(range(first, first + WINDOW), key=lambda slot: self._free_at[slot])
        if self._free_at[idle] > now:
            raise RuntimeError(
                f"the emulated wire has more than {LINKS} links in use at once; use fewer process groups, or "
                f'links="rank"'
            )
        self._link_keys[idle], self._free_at[idle] = key, 0.0
        return idle
