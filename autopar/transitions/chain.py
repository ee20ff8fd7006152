"""Chain transfers: each with the type that it leads to and the bytes that it brings the worst rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from autopar.ir import transfers
from autopar.ir.record import TensorType

Move = tuple[Any, dict[str, Any]]  # a transfer and its arguments after the operand
MANY = 16  # above so many choices of places, all axes take the same place


@dataclass(frozen=True)
class TransferStep:
    """One transfer of a sequence: its function, its arguments after the operand, the resulting type, and its bytes.

    ``bytes`` is how many the worst rank receives.
    """

    function: Any
    arguments: tuple[tuple[str, Any], ...]
    type: TensorType
    bytes: int


@dataclass(frozen=True)
class TransferChain:
    """Transfers that lead to a type, and the bytes that the worst rank receives.

    ``extra``: the bytes that the chain must save to be chosen.
    """

    type: TensorType
    steps: tuple[TransferStep, ...] = ()
    bytes: int = 0
    extra: int = 0

    def then(self, *moves: Move, meshes: transfers.Meshes = {}) -> TransferChain:  # noqa: B006
        type, steps, paid = self.type, list(self.steps), self.bytes
        for function, arguments_by_name in moves:
            arguments = tuple(arguments_by_name.items())
            step = _step(type, function, arguments) if not meshes else _new_step(type, function, arguments, meshes)
            if step.type == type and function is not transfers.send:
                continue
            type, paid = step.type, paid + step.bytes
            steps.append(step)
        return TransferChain(type, tuple(steps), paid, self.extra)


def _new_step(
    type: TensorType, function: Any, arguments: tuple[tuple[str, Any], ...], meshes: transfers.Meshes
) -> TransferStep:
    arguments_by_name = dict(arguments)
    after = transfers.BY_FUNCTION[function].infer(type, arguments_by_name, meshes)
    return TransferStep(function, arguments, after, transfers.received(function, type, arguments_by_name, after))


@lru_cache(maxsize=65536)
def _step(type: TensorType, function: Any, arguments: tuple[tuple[str, Any], ...]) -> TransferStep:
    """Return the step of a transfer on one mesh; cached, because alternatives often begin alike."""
    return _new_step(type, function, arguments, {})


def places_for(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield a place for each axis; if there are too many such choices, one place for all axes."""
    return itertools.product(range(count), repeat=axes) if count**axes <= MANY else ((k,) * axes for k in range(count))


def op_argument(kind: str) -> dict[str, Any]:
    return {} if kind == "sum" else {"op": kind}


def parts_argument(sizes: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {"parts": sizes} if any(len(dim) > 1 for dim in sizes) else {}
