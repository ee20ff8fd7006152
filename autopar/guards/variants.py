"""Captures of one and the same call that differ in the Python values that forward read: a few are kept, and found again."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.guards.look import Guards
from autopar.guards.numbers import can_be_input
from autopar.guards.places import Change, Place

KEPT = 8  # captures of one call: values that change at each step would make ever more of them


@dataclass(frozen=True)
class Call:
    """A call, and which capture of it is used.

    Attributes:
        key: what a capture is keyed by beside the values that forward reads.
        number: of the capture, which tells it from the others of this key.
        changes: in which values the capture differs from the one before.
        known: whether it was captured before.
        numbers: places whose floats are inputs, or should become some.
    """

    key: Any
    number: int
    changes: tuple[Change, ...] = ()
    known: bool = False
    numbers: tuple[Place, ...] = ()

    @property
    def identity(self) -> tuple[Hashable, int]:
        return self.key, self.number

    @property
    def where(self) -> str:
        """The values in words, the same on every rank that has them."""
        return f" where {', '.join(map(str, self.changes))}" if self.changes else ""

    @property
    def numbers_now(self) -> str:
        """The numbers that are inputs, in words."""
        return "".join(f", {place.words}={place.now()!r}" for place in self.numbers)


@dataclass(eq=False)
class Variant:
    """One capture of a call."""

    call: Call
    guards: Guards


class Variants:
    """What was captured of each call, by its key; the capture used last comes last."""

    def __init__(self) -> None:
        self._of: dict[Hashable, list[Variant]] = {}
        self._made = 0
        self._changed: collections.Counter[tuple[Hashable, tuple[int, str]]] = collections.Counter()  # how often a number did
        self._constant: set[tuple[int, str]] = set()  # numbers that cannot be inputs

    def call(self, key: Hashable, modules: Sequence[torch.nn.Module]) -> Call:
        """The call of such a key, as the model's values are now."""
        known = self._of.get(key)
        if known is None:
            return Call(key, self._made)
        for variant in reversed(known):
            if variant.guards.hold(modules):
                if variant is not known[-1]:
                    known.remove(variant)
                    known.append(variant)
                return variant.call
        changes = tuple(known[-1].guards.changes(modules))
        again = [change.place for change in changes if can_be_input(change.place) and self._changed[key, change.place.identity]]  # type: ignore[union-attr]
        numbers = [place for place in (*known[-1].guards.numbers, *again) if place.identity not in self._constant]
        return Call(key, self._made, changes, numbers=tuple(dict.fromkeys(numbers)))

    def _warn(self, call: Call, change: Change, guards: Guards) -> None:
        """Once of each number that changes again and is more than an operand of tensors."""
        place = change.place
        if place in call.numbers and place not in guards.numbers:
            self._constant.add(place.identity)  # type: ignore[union-attr]
            warnings.warn(
                f"forward uses {place.words} not only in arithmetic with tensors, so each new value captures the step anew ({change})"  # type: ignore[union-attr]
                + f"\n{place.line and '    ' + place.line + chr(10)}  let it change seldom, or make it a buffer, or an argument of forward that is a tensor",  # type: ignore[union-attr]
                stacklevel=2,
            )

    def add(self, call: Call, guards: Guards) -> list[Call]:
        """Keep the capture of a call; those that are forgotten for it."""
        known = self._of.setdefault(call.key, [])
        known.append(Variant(Call(call.key, call.number, call.changes, known=True, numbers=guards.numbers), guards))
        self._made += 1
        for change in call.changes:
            if can_be_input(change.place):
                self._changed[call.key, change.place.identity] += 1  # type: ignore[union-attr]
                self._warn(call, change, guards)
        forgotten = [variant.call for variant in known[:-KEPT]]
        del known[:-KEPT]
        return forgotten
