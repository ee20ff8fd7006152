"""Issue one transfer in the table of the wire, read its times, and raise if a member is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.runtime.wire.clock import now, sleep_until
from autopar.runtime.wire.link_table import LinkTable, LinkTimes
from autopar.runtime.wire.report import Counts
from autopar.runtime.wire.shared_file import SharedFile

FIRST_PAUSE, LONGEST_PAUSE = 50e-6, 1e-3  # seconds between two looks at the table
ALIVE = 0.05  # seconds between two looks at the other ranks


@dataclass(frozen=True)
class Medium:
    """The table, the file that holds it, and the counts, which all groups of a process share."""

    table: LinkTable
    file: SharedFile
    counts: Counts


@dataclass(frozen=True)
class Transfer:
    """One transfer, as this process has issued it.

    Attributes:
        key: its key in the table.
        members: the ranks that issue it, in the world.
        links: the keys of the links that it occupies.
        group, name, bytes, seconds: the name of the group, the method, the bytes and the price.
        timeout: the seconds in which all members must issue it.
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

    def times(self) -> LinkTimes | None:
        """Return its times, once; ``None`` while a member has not issued it."""
        return self.medium.table.times(self.key, len(self.members))

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
