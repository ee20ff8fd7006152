"""Count what a process has sent over the emulated wire, and how late real data and real computing were."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from autopar.runtime.wire.clock import now

MOST_LATE = 0.02  # of the span: with more late seconds, a figure is void
KEPT = 10_000  # the newest transfers, which ``Wire.records`` lists


class Record(NamedTuple):
    """One finished transfer of this process; times are seconds of the host's monotonic clock.

    Attributes:
        group: the name of the process group.
        name: the method of the process group, such as ``allreduce``.
        bytes: its size, as it was priced.
        begin, end: its times on the wire; it ends no earlier.
        arrived: when the real data had arrived; known of a send or a receive only when it is waited for.
    """

    group: str
    name: str
    bytes: int
    begin: float
    end: float
    arrived: float


@dataclass(frozen=True)
class WireReport:
    """What one process has sent over the wire in a span of time.

    Attributes:
        seconds: the length of the span.
        transfers: the number of finished transfers.
        bytes: the sum of their sizes.
        charged: the sum of their seconds on the wire.
        late: the seconds in which real data or real computing was after its floor; spans that overlap count once.
        transfers_late: how many transfers were late.
    """

    seconds: float
    transfers: int
    bytes: int
    charged: float
    late: float
    transfers_late: int

    @property
    def share_late(self) -> float:
        """The late seconds as a share of the span."""
        return self.late / self.seconds if self.seconds > 0 else 0.0

    @property
    def void(self) -> str:
        """Why a figure that was measured in this span is void; empty if it is valid."""
        if not self.transfers:
            return (
                "nothing has travelled over the wire: make the default group after autopar.emulate, without a backend"
            )
        if self.share_late > MOST_LATE:
            return (
                f"{100 * self.share_late:.1f} % of the time was late, more than {100 * MOST_LATE:g} %: this machine is "
                f"too slow for this wire; use a slower wire, or fewer ranks"
            )
        return ""

    def __str__(self) -> str:
        text = (
            f"wire: {self.transfers} transfers, {self.bytes / 1e6:.3f} MB, {self.charged * 1e3:.3f} ms charged; "
            f"{self.transfers_late} late, {self.late * 1e3:.3f} of {self.seconds * 1e3:.3f} ms"
        )
        return f"{text}\nvoid: {self.void}" if self.void else text


class Counts:
    """Adds up the transfers of this process, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin a new span."""
        with self._lock:
            self._since = now()
            self._transfers = self._bytes = self._late_transfers = 0
            self._charged = 0.0
            self._late: list[tuple[float, float]] = []  # spans
            self.records: deque[Record] = deque(maxlen=KEPT)

    def finished(self, record: Record, since: float | None = None) -> None:
        """Count a transfer.

        Args:
            since: when this process began to wait for the data, if it may have waited only after the end.
        """
        with self._lock:
            self._transfers += 1
            self._bytes += record.bytes
            self._charged += record.end - record.begin
            self.records.append(record)
            floor = record.end if since is None else max(record.end, since)
            if record.arrived > floor:
                self._late_transfers += 1
                self._late.append((floor, record.arrived))

    def late(self, floor: float, end: float) -> None:
        """Count a delay: computing ended at ``end``, and its floor was ``floor``."""
        with self._lock:
            if end > floor:
                self._late.append((floor, end))

    def report(self) -> WireReport:
        """Return the sums since the last reset."""
        with self._lock:
            self._late = merged(self._late)
            late = sum(end - start for start, end in self._late)
            return WireReport(
                now() - self._since, self._transfers, self._bytes, self._charged, late, self._late_transfers
            )


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same times as spans that do not overlap, in order."""
    apart: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        else:
            apart.append((start, end))
    return apart
