"""Keep a few captures of one call that differ in the Python values that forward read, and find the one that fits."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.guards.look import Guards
from autopar.capture.guards.numbers import can_be_input
from autopar.capture.guards.places import GuardedChange, GuardedPlace

KEPT = 8  # captures of one call; a value that changes at each step would make ever more


@dataclass(frozen=True)
class GuardedCall:
    """A call, and which capture of it is used.

    Attributes:
        key: the key of the capture, without the values that forward reads.
        number: the number of the capture, which distinguishes it from others with this key.
        changes: the values in which this capture differs from the one before.
        known: whether this call was captured before.
        numbers: places whose floats are inputs, or should become inputs.
    """

    key: Any
    number: int
    changes: tuple[GuardedChange, ...] = ()
    known: bool = False
    numbers: tuple[GuardedPlace, ...] = ()

    @property
    def identity(self) -> tuple[Hashable, int]:
        return self.key, self.number

    @property
    def where(self) -> str:
        """The changed values in words, the same on every rank that has them."""
        return f" where {', '.join(map(str, self.changes))}" if self.changes else ""

    @property
    def numbers_now(self) -> str:
        """The numbers that are inputs, in words."""
        return "".join(f", {place.words}={place.now()!r}" for place in self.numbers)


@dataclass(eq=False)
class Variant:
    """One capture of a call."""

    call: GuardedCall
    guards: Guards


class Variants:
    """The captures of each call, by its key; the capture that was used last comes last."""

    def __init__(self) -> None:
        self._of: dict[Hashable, list[Variant]] = {}
        self._made = 0
        # the values that a place had, in words
        self._values: dict[tuple[Hashable, tuple[int, str]], set[str]] = collections.defaultdict(set)
        # places whose values change and cannot be inputs; the user was warned of them
        self._constant: set[tuple[int, str]] = set()

    @property
    def calls(self) -> list[GuardedCall]:
        """The calls whose captures are kept."""
        return [variant.call for variants in self._of.values() for variant in variants]

    def call(self, key: Hashable, modules: Sequence[torch.nn.Module]) -> GuardedCall:
        """Return the call with this key, for the model's values as they are now."""
        known = self._of.get(key)
        if known is None:
            return GuardedCall(key, self._made)
        for variant in reversed(known):
            if variant.guards.hold(modules):
                if variant is not known[-1]:
                    known.remove(variant)
                    known.append(variant)
                return variant.call
        changes = tuple(known[-1].guards.changes(modules))
        again = [
            place
            for change in changes
            if (place := change.place) is not None and can_be_input(place) and self._changes_again(key, place, change)
        ]
        numbers = [place for place in (*known[-1].guards.numbers, *again) if place.identity not in self._constant]
        return GuardedCall(key, self._made, changes, numbers=tuple(dict.fromkeys(numbers)))

    def _changes_again(self, key: Hashable, place: GuardedPlace, change: GuardedChange) -> bool:
        """Return whether the value of a place has changed before."""
        return len(self._values[key, place.identity] | {change.before, change.now}) > 2

    def _warn(self, key: Hashable, change: GuardedChange, place: GuardedPlace, guards: Guards) -> None:
        """Warn once of each value that changes again and is not an input."""
        if (
            self._changes_again(key, place, change)
            and place not in guards.numbers
            and place.identity not in self._constant
        ):
            self._constant.add(place.identity)
            how = (
                f"uses {place.words} not only in arithmetic with tensors"
                if can_be_input(place)
                else f"reads {place.words}"
            )
            warnings.warn(
                f"forward {how}, and each new value captures the step anew "
                f"({change})\n" + (f"    {place.line}\n" if place.line else "")
                + "  let it change seldom, or make it a buffer, or an argument of forward that is a tensor",
                stacklevel=2,
            )  # fmt: skip

    def add(self, call: GuardedCall, guards: Guards) -> list[GuardedCall]:
        """Keep the capture of a call; return the calls whose captures are dropped for it."""
        known = self._of.setdefault(call.key, [])
        known.append(
            Variant(GuardedCall(call.key, call.number, call.changes, known=True, numbers=guards.numbers), guards)
        )
        self._made += 1
        for change in call.changes:
            if change.place is not None:
                self._values[call.key, change.place.identity] |= {change.before, change.now}
                self._warn(call.key, change, change.place, guards)
        dropped = [variant.call for variant in known[:-KEPT]]
        del known[:-KEPT]
        return dropped
