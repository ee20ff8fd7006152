"""Define the ops that are scheduled: computations and collectives, with their seconds and the ops that they read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import ScheduleError, shown

COMPUTE = "compute"


@dataclass(frozen=True)
class Op:
    """One op of a step.

    Attributes:
        name: its name, which no other op has.
        stream: ``"compute"``, or the name of a stream of collectives, such as ``"dp"``. A stream is one process group.
        seconds: its duration, of a collective with the start-up cost.
        after: the names of the ops whose results it reads.
        bytes: the bytes that a collective sends, so that it can be cut and share a message. A collective of 0 bytes is
            sent whole, in a message of its own.
        kind: collectives share a message only if they have one stream and one kind; any value that can be hashed.
        memory: the bytes of its result, which is alive from the begin of the op to the end of its last reader. A result
            that no op reads is a result of the step, and stays alive.
        behind: the names of further ops that must be over before it begins, though it does not read their results: it
            overwrites memory that they read.
        link: the name of the link that carries a collective. Messages of several streams on one link share its
            bandwidth. By default each stream has a link of its own.

    Raises:
        ScheduleError: a number is negative or not finite.
        TypeError: a value has the wrong type.
    """

    name: str
    stream: str
    seconds: float
    after: Sequence[str] = ()
    bytes: int = 0
    kind: Any = ""
    memory: int = 0
    behind: Sequence[str] = ()
    link: str = ""

    def __post_init__(self) -> None:
        for label in ("name", "stream"):
            if not isinstance(getattr(self, label), str) or not getattr(self, label):
                raise TypeError(f"the {label} of an op is a word, not {shown(getattr(self, label))}")
        if not isinstance(self.link, str):
            raise TypeError(f"op {self.name!r}: link={shown(self.link)} is no word, such as 'dp'")
        if self.link and self.computes:
            raise ScheduleError(
                f"op {self.name!r} computes, so that it has no link; give link={self.link!r} to collectives"
            )
        for label in ("after", "behind"):
            names = getattr(self, label)
            is_sequence = isinstance(names, Iterable) and not isinstance(names, str)
            if not is_sequence or not all(isinstance(name, str) for name in names):
                raise TypeError(f"op {self.name!r}: {label}={shown(names)} is no sequence of names, such as ('loss',)")
            object.__setattr__(self, label, tuple(names))
        try:
            hash(self.kind)
        except TypeError:
            raise TypeError(f"op {self.name!r}: kind={shown(self.kind)} cannot be hashed") from None
        for label, types in (("seconds", (int, float)), ("bytes", (int,)), ("memory", (int,))):
            value = getattr(self, label)
            if isinstance(value, bool) or not isinstance(value, types):
                raise TypeError(
                    f"op {self.name!r}: {label}={shown(value)} is no {'number' if float in types else 'int'}"
                )
            if not 0 <= value < math.inf:
                raise ScheduleError(f"op {self.name!r}: {label}={shown(value)}; give a finite number from 0")

    @property
    def before(self) -> tuple[str, ...]:
        """The names of all ops that must be over before it begins."""
        return (*self.after, *self.behind)

    @property
    def computes(self) -> bool:
        """Whether it computes; else it is a collective."""
        return self.stream == COMPUTE
