"""Captures of one and the same call that differ in the Python values that forward read: a few are kept, and found again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.guards.look import Guards
from autopar.guards.places import Change

KEPT = 8  # captures of one call: values that change at each step would make ever more of them


@dataclass(frozen=True)
class Call:
    """A call, and which capture of it is used.

    Attributes:
        key: what a capture is keyed by beside the values that forward reads.
        number: of the capture, which tells it from the others of this key.
        changes: in which values the capture differs from the one before.
        known: whether it was captured before.
    """

    key: Any
    number: int
    changes: tuple[Change, ...] = ()
    known: bool = False

    @property
    def identity(self) -> tuple[Hashable, int]:
        return self.key, self.number

    @property
    def where(self) -> str:
        """The values in words, the same on every rank that has them."""
        return f" where {', '.join(map(str, self.changes))}" if self.changes else ""


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
        return Call(key, self._made, tuple(known[-1].guards.changes(modules)))

    def add(self, call: Call, guards: Guards) -> list[Call]:
        """Keep the capture of a call; those that are forgotten for it."""
        known = self._of.setdefault(call.key, [])
        known.append(Variant(Call(call.key, call.number, call.changes, known=True), guards))
        self._made += 1
        forgotten = [variant.call for variant in known[:-KEPT]]
        del known[:-KEPT]
        return forgotten
