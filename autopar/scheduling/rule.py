"""Define the rules by which list scheduling takes what is ready: how messages are cut and filled, and who waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

Sizes = float | Mapping[int, float]  # bytes: for all kinds of collectives, or kind → bytes


@dataclass(frozen=True)
class Rule:
    """How a stream takes what is ready.

    Attributes:
        chunk: the most bytes of one collective in a message.
        window: a message is filled up to these bytes, with further collectives of its kind.
        piece: bytes; what does not fit into a window whole is cut after a multiple of them. 0: it is left out.
        credit: bytes that may be started and not yet done; a message that is alone may have more.
        cut: seconds; a message is cut where a more urgent one can start, if at least so many are left.
        patience: computation waits for a more urgent op that is ready within this share of the seconds of the op that
            is ready now.
        program_order: whether ops compute in the order of the program.
    """

    chunk: Sizes = inf
    window: Sizes = 0
    piece: int = 0
    credit: float = 0
    cut: float = inf
    patience: float = 0.0
    program_order: bool = False

    def chunk_of(self, kind: int) -> float:
        """Return the most bytes of one collective of a kind in a message."""
        return _of_kind(self.chunk, kind)

    def window_of(self, kind: int) -> float:
        """Return the bytes up to which a message of a kind is filled."""
        return _of_kind(self.window, kind)

    def effect(self, largest: Mapping[int, int], total: Mapping[int, int]) -> tuple[object, ...]:
        """Return what rules that take the ops of a graph alike have in common: sizes count up to its collectives'.

        Args:
            largest: kind → the bytes of its largest collective.
            total: kind → the bytes of all its collectives.
        """
        chunks = tuple(min(self.chunk_of(kind), size) for kind, size in largest.items())
        windows = tuple(min(self.window_of(kind), size) for kind, size in total.items())
        whole = not self.credit and windows == tuple(total.values())  # all that is left fits in, and nothing is cut
        return chunks, windows, 0 if whole else self.piece, self.credit, self.cut, self.patience, self.program_order


def _of_kind(sizes: Sizes, kind: int) -> float:
    return sizes.get(kind, 0.0) if isinstance(sizes, Mapping) else sizes


def aligned(size: int) -> int:
    """Return the bytes of which a chunk of a collective is a multiple: whole elements of any dtype, if it has many."""
    return 16 if size >= 4096 else 1
