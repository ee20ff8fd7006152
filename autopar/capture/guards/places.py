"""Define the variables and attributes of Python that forward reads, and the guards that compare their values.

A place is an attribute, an entry of a dict, a global or a closure variable.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.capture.guards.values import Contents, frozen, is_container, is_fixed, is_scalar, shown


class _Sentinel:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


MISSING = _Sentinel("missing")
UNKNOWN = _Sentinel("unknown")  # the value was not read while forward ran
# attributes that are stored outside of an object's dict, and are not computed at each read
STORED = ("__class__", "__defaults__", "__kwdefaults__")


@dataclass(frozen=True, eq=False)
class GuardedPlace:
    """A place that holds a value which forward reads.

    Attributes:
        holder: a dict, the mapping of a class, a closure's cell, or an object whose attribute is computed.
        key: the key or name of the value in the holder.
        words: the user's name for it, such as ``encoder.l.p``.
        computed: whether it is read with ``getattr``.
        line: the user's line that read it first.
        owner: the class whose attributes the holder has, if it is the mapping of a class.
    """

    holder: Any
    key: str
    words: str
    computed: bool = False
    line: str = ""
    owner: Any = None

    @property
    def identity(self) -> tuple[int, str]:
        return id(self.holder), self.key

    def now(self) -> Any:
        """Return the value that is there now, or ``MISSING``."""
        if isinstance(self.holder, types.CellType):
            try:
                return self.holder.cell_contents
            except ValueError:
                return MISSING
        if self.computed:
            return getattr(self.holder, self.key, MISSING)
        return self.holder.get(self.key, MISSING)


@dataclass(eq=False)
class Guard:
    """A place, and the value that a capture read there.

    Attributes:
        value: the value itself.
        frozen: the value at the capture, in a form to compare.
        text: the value at the capture, in words.
        skipped: whether a value inside of a container is left out of the comparison.
    """

    place: GuardedPlace
    value: Any
    frozen: Any
    text: str
    skipped: Callable[[Any], bool]

    @staticmethod
    def of(place: GuardedPlace, skipped: Callable[[Any], bool]) -> Guard:
        value = place.now()
        return Guard(place, value, frozen(value, skipped), shown(value), skipped)

    def __post_init__(self) -> None:
        self._contents = Contents(self.value) if is_container(self.value) else None

    @property
    def by_identity(self) -> bool:
        """Whether the same object means the same value."""
        return (not self.place.computed or self.place.key in STORED) and is_fixed(self.value)

    def holds(self) -> bool:
        value = self.place.now()
        if value is self.value and self._contents is not None and self._contents.fixed and self._contents.hold():
            return True
        if frozen(value, self.skipped) != self.frozen:
            return False
        self.value = value  # an equal object: from now on its identity is enough
        self.__post_init__()
        return True


@dataclass(frozen=True)
class GuardedChange:
    """A value that has changed since a capture, in words."""

    place: GuardedPlace | None
    words: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.words} is {self.now}, it was {self.before}"

    @staticmethod
    def of(guard: Guard) -> GuardedChange:
        value = guard.place.now()
        now = shown(value)
        if guard.text == now and not is_scalar(value):
            now = (
                f"another {now.removeprefix('a ').removeprefix('the ')}"
                if value is not guard.value
                else f"{now} with other contents"
            )
        return GuardedChange(guard.place, guard.place.words, guard.text, now)
