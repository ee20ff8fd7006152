"""Define the beat that each rank posts twice a second, and follow a rank by its beats.

A beat has the state of the rank, its current op and whom it waits for, and its process.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from autopar.runtime.current_op import CurrentOp

# states that a rank posts; cut: it failed because the connection to a peer broke; terminated: SIGTERM came
ALIVE, FAILED, CUT, ENDED, TERMINATED = "alive", "failed", "cut", "ended", "terminated"
# states of a process, as others on its host see them
RUNNING, STOPPED, DEAD, UNKNOWN = "running", "stopped", "dead", "unknown"


_BROKEN = re.compile(
    r"gloo/|NCCL|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|pair closure|failed to (recv|send)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Process:
    """One process for all time: pids are reused, and mean nothing on another host or in another container."""

    host: str
    pid: int
    born: str  # in ticks since boot; "" where the system does not say

    def state(self) -> str:
        """Return whether the process runs, is stopped or is dead; ``UNKNOWN`` if it is on another host."""
        if self.host != _host():
            return UNKNOWN
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return DEAD
        except PermissionError:
            pass
        letter, born = _status(self.pid)
        if not letter:
            return DEAD if self.born else RUNNING  # it ended between the two checks, or there is no /proc
        if born != self.born or letter in "ZX":  # a zombie accepts signals until its parent waits for it
            return DEAD
        return STOPPED if letter == "T" else RUNNING


@dataclass(frozen=True)
class Beat:
    """One sign of life of a rank."""

    sequence: int
    state: str
    place: CurrentOp
    process: Process
    error: str = field(default="")  # the error in one line, if the rank failed
    host: tuple[str, str] = ("", "")  # the launcher's number of its node, and the name of its host
    listener: str = ""  # where the first rank of a host has its ``Listener``
    neighbours: dict[int, str] = field(
        default_factory=dict
    )  # rank on this host that is stopped or dead → which of both

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def load(text: bytes) -> Beat:
        row = json.loads(text)
        place = CurrentOp(**{**row["place"], "peers": tuple(row["place"]["peers"])})
        neighbours = {int(rank): state for rank, state in row["neighbours"].items()}
        process, host = Process(**row["process"]), tuple(row["host"])
        return Beat(**{**row, "place": place, "process": process, "host": host, "neighbours": neighbours})


def process_of(pid: int) -> Process:
    """Return a process of this host."""
    return Process(_host(), pid, _status(pid)[1])


def _host() -> str:
    """Return the name of the host, and of the container in it."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _status(pid: int) -> tuple[str, str]:
    """Return the letter of a process's state and its start time; empty if there is no such process, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name in parentheses may contain anything
    except OSError:
        return "", ""
    return fields[0], fields[19]


def broke_off(error: BaseException | None) -> bool:
    """Return whether an exception only says that a peer went away, so that another rank is to blame."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _BROKEN.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False


# -- a rank as another follows it, by its beats ------------------------------------------------------------------------


@dataclass(frozen=True)
class RankState:
    """The state of one rank as another rank sees it. Seconds are those of the watching rank."""

    beat: Beat | None  # None: the rank has not begun
    process: str  # running, stopped, dead, unknown
    silent: float  # seconds since its newest beat came
    still: float  # seconds since it last made progress
    settled: float  # seconds since its state changed
    unreachable: bool = False  # whether the kernel of its host does not answer any more

    def is_in(self, *states: str) -> bool:
        return self.beat is not None and self.beat.state in states

    @property
    def inside(self) -> bool:
        return self.beat is not None and self.beat.state == ALIVE and self.beat.place.inside


class FollowedRank:
    """One rank, updated by its beats. Times are those of the watching rank's clock."""

    def __init__(self) -> None:
        self.beat: Beat | None = None
        self.process = UNKNOWN
        self.came = self.moved = self.settled = 0.0

    def take(self, beat: Beat, now: float) -> None:
        last, self.beat = self.beat, beat
        if last is None or beat.sequence != last.sequence:
            self.came = now
        if last is None or beat.state != last.state:
            self.settled = now
        if last is None or _progress(beat.place) != _progress(last.place):
            self.moved = now

    def state(self, now: float, unreachable: bool = False) -> RankState:
        return RankState(self.beat, self.process, now - self.came, now - self.moved, now - self.settled, unreachable)


def _progress(place: CurrentOp) -> tuple[int, str]:
    """Return a value that changes while a rank makes progress. Outside of a step, nothing counts as progress."""
    return place.ticks, place.text if place.inside else ""
