"""Define the tasks that ranks communicate by, and the channels that they use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.ir.streams import DEFAULT, Ranks, Stream


@dataclass(frozen=True, slots=True)
class Collective:
    """An op that all ``ranks``, in the order of their group, run together.

    ``payload`` has facts (name, value) that must agree on all ranks; it is compared where it is given. Each ``stream``
    of the same ranks is a group of its own, with an order of its own.
    """

    value: str
    op: str
    ranks: Ranks
    payload: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    stream: str = DEFAULT

    @property
    def group(self) -> Stream:
        """The group that runs it."""
        return self.ranks, self.stream

    def __str__(self) -> str:
        return f"{self.value} = {self.op} of {some_ranks(self.ranks)}{on(self.stream)}"


@dataclass(frozen=True, slots=True)
class Send:
    """A message. ``bytes`` and ``payload`` are compared if both ends have them. Each ``stream`` has its own order."""

    value: str
    to: int
    bytes: int | None = None
    payload: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    stream: str = DEFAULT

    def __str__(self) -> str:
        return f"send {self.value} to {self.to}{on(self.stream)}"


@dataclass(frozen=True, slots=True)
class Receive:
    """The other end of a ``Send``."""

    value: str
    source: int
    bytes: int | None = None
    payload: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    stream: str = DEFAULT

    def __str__(self) -> str:
        return f"receive {self.value} from {self.source}{on(self.stream)}"


@dataclass(frozen=True, slots=True)
class Group:
    """Messages that are posted together, as by ``batch_isend_irecv``.

    The group has finished when all its messages have.
    """

    tasks: tuple[Send | Receive, ...]


Task = Collective | Send | Receive | Group
Step = tuple[Collective | Send | Receive, ...]  # tasks that a rank posts at once


@dataclass(frozen=True)
class Channels:
    """The rule that decides when a message is done.

    Attributes:
        capacity: a send to a rank waits while so many messages are unreceived there; 0: until it is received, ``None``:
            never.
        together: whether the messages of a group are posted together, and not one after the other.
        about: what a send waits for, in words.
        remedy: what to do if ranks wait forever.
    """

    name: str
    capacity: int | None
    together: bool
    about: str
    remedy: str

    @property
    def strictness(self) -> tuple[float, bool]:
        return -math.inf if self.capacity is None else -self.capacity, not self.together

    def looser(self, other: Channels) -> bool:
        """Return whether all programs that finish on ``other`` finish on these channels.

        More room and earlier posts block nobody.
        """
        return all(a <= b for a, b in zip(self.strictness, other.strictness, strict=True))


def buffered(k: int) -> Channels:
    """Return channels that hold ``k`` messages of each ordered pair of ranks."""
    if k < 1:
        raise ValueError(f"buffered({k}) holds no message; without buffers channels are GROUPED or BLOCKING")
    return Channels(f"{k}-buffered", k, True, f"a send waits while {k} before it are unreceived",
                    f"receive earlier, or make room for more than {k}")  # fmt: skip


ASYNCHRONOUS = Channels("asynchronous", None, True, "only receives wait", "send earlier what another rank waits for")
GROUPED = Channels(
    "grouped",
    0,
    True,
    "both ends of a message wait for each other, and all of a group are posted together",
    "put messages that cross into one group, on each rank",
)
BLOCKING = Channels(
    "blocking",
    0,
    False,
    "both ends of a message wait for each other, and a rank does one after the other",
    "put the messages of all ranks into one order, or group those that cross and post groups together",
)
ALL = (ASYNCHRONOUS, buffered(1), GROUPED, BLOCKING)


def some_ranks(ranks: Ranks) -> str:
    shown = (
        " ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} {ranks[1]} … {ranks[-1]} ({len(ranks)} in all)"
    )
    return f"ranks {shown}"


def on(stream: str) -> str:
    """Return how an error names a stream; the default one has no name."""
    return f" on {stream}" if stream else ""
