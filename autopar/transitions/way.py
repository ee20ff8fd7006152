"""Ways: transfers one after the other, with what they lead to and what they bring the worst rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autopar.ir import transfers
from autopar.ir.record import TensorType

Move = tuple[Any, dict[str, Any]]  # a transfer and its arguments after the operand
MANY = 16  # choices of places, above which several axes take the same one


@dataclass(frozen=True)
class TransferStep:
    """One transfer of a sequence: its function, its arguments after the operand, what it leads to, and what it moves.

    ``bytes`` are those that the worst rank receives.
    """

    function: Any
    arguments: tuple[tuple[str, Any], ...]
    type: TensorType
    bytes: int


@dataclass(frozen=True)
class Way:
    """Transfers from a type on, with what the worst rank receives; and what they have to save to be taken."""

    type: TensorType
    steps: tuple[TransferStep, ...] = ()
    bytes: int = 0
    extra: int = 0

    def then(self, *moves: Move, meshes: transfers.Meshes = {}) -> Way:  # noqa: B006
        type, steps, paid = self.type, list(self.steps), self.bytes
        for function, given in moves:
            arguments = tuple(given.items())
            step = _step(type, function, arguments) if not meshes else _new_step(type, function, arguments, meshes)
            if step.type == type and function is not transfers.send:
                continue
            type, paid = step.type, paid + step.bytes
            steps.append(step)
        return Way(type, tuple(steps), paid, self.extra)


def _new_step(type: TensorType, function: Any, arguments: tuple[tuple[str, Any], ...], meshes: transfers.Meshes) -> TransferStep:
    given = dict(arguments)
    after = transfers.BY_FUNCTION[function].infer(type, given, meshes)
    return TransferStep(function, arguments, after, transfers.received(function, type, given, after))


@lru_cache(maxsize=65536)
def _step(type: TensorType, function: Any, arguments: tuple[tuple[str, Any], ...]) -> TransferStep:
    """On one mesh: what is chosen between often begins alike."""
    return _new_step(type, function, arguments, {})


def places_for(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """A place for each axis; if there are too many such choices, one place for all."""
    return itertools.product(range(count), repeat=axes) if count**axes <= MANY else ((k,) * axes for k in range(count))


def op_argument(kind: str) -> dict[str, Any]:
    return {} if kind == "sum" else {"op": kind}


def parts_argument(sizes: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {"parts": sizes} if any(len(dim) > 1 for dim in sizes) else {}
