"""Issue one transfer in the table of the wire, read its times, and raise if a member is missing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.runtime.wire.clock import now, sleep_until
from autopar.runtime.wire.link_table import LinkTable, LinkTimes
from autopar.runtime.wire.report import Counts, Record
from autopar.runtime.wire.shared_file import SharedFile

FIRST_PAUSE, LONGEST_PAUSE = 50e-6, 1e-3  # seconds between two looks at the table
ALIVE = 0.05  # seconds between two looks at the other ranks


@dataclass(frozen=True)
class Medium:
    """The table, the file that holds it, and the counts, which all groups of a process share."""

    table: LinkTable
    file: SharedFile
    counts: Counts


@dataclass(eq=False)
class Transfer:
    """One transfer, as this process has issued it.

    Attributes:
        key: its key in the table.
        members: the ranks that issue it, in the world.
        links: the keys of the links that it occupies.
        group, name, bytes, seconds: the name of the group, the method, the bytes and the price.
        timeout: the seconds in which all members must issue it.
        times: when it begins and ends, once that is decided.
    """

    key: int
    members: Sequence[int]
    links: Sequence[int]
    group: str
    name: str
    bytes: int
    seconds: float
    timeout: float
    medium: Medium
    times: LinkTimes | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)  # several threads may ask for the times

    def issue(self, at: float | None = None) -> None:
        """Enter it into the table. While the table is full, wait.

        Raises:
            RuntimeError: the table was full for the whole time-out.
        """
        limit = now() + self.timeout
        while not self.medium.table.issue(self.key, len(self.members), self.links, self.seconds, at):
            if now() > limit:
                raise RuntimeError(
                    f"the emulated wire has had no room for {self.name} for {self.timeout:g} s: too many transfers "
                    f"are started and not waited for"
                )
            sleep_until(now() + LONGEST_PAUSE)

    def decided(self, arrived: float, since: float | None = None) -> bool:
        """Return whether the times are known. The first call that finds them counts the transfer."""
        with self._lock:
            if self.times is None:
                self.times = self.medium.table.times(self.key, len(self.members))
                if self.times is not None:
                    record = Record(self.group, self.name, self.bytes, *self.times, arrived)
                    self.medium.counts.finished(record, since)
            return self.times is not None

    def wait(self, arrived: float, since: float | None = None) -> LinkTimes:
        """Wait until the times are known: the data of a broadcast may arrive before all ranks have issued it."""
        begun = looked = now()
        pause = FIRST_PAUSE
        while not self.decided(arrived, since):
            if now() > looked + ALIVE:
                looked = now()
                if (error := self.missing()) is not None and not self.decided(arrived, since):
                    raise error
                if looked > begun + self.timeout:
                    raise self.too_late()
            sleep_until(now() + pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        assert self.times is not None
        return self.times

    def missing(self) -> RuntimeError | None:
        """Return an error if a member's process has ended, so that the transfer may never begin."""
        dead = [rank for rank in self.members if not self.medium.file.is_alive(rank)]
        if not dead:
            return None
        return RuntimeError(
            f"rank {dead[0]} has ended, and not all ranks have issued {self.name} of group {self.group}"
        )

    def too_late(self) -> RuntimeError:
        """Return the error of a transfer that some member has not issued within the time-out."""
        return RuntimeError(f"not all ranks have issued {self.name} of group {self.group} within {self.timeout:g} s")
