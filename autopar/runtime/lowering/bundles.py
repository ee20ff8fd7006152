"""Plan the message between two neighbouring stages: all values that cross a boundary, in one message a pair of ranks.

A value keeps the layout that its producer gives it. So each rank mostly sends its whole piece to the rank with the
same coordinates. Where the layouts differ, the boxes are those of any exchange between meshes
(``runtime.lowering.packing``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autopar.ir.record import TensorType
from autopar.ir.transfers import Ends
from autopar.runtime.lowering.packing import Places, as_bytes, box_shape, from_bytes, new_piece, packing, size_of, take

ALIGNED = 16  # bytes: each box begins at a multiple, so that it can be viewed in any dtype


@dataclass(frozen=True)
class Crossed:
    """One value of a bundle.

    Attributes:
        name: the value, where it is made.
        ends: its shape, and its layouts at both ends.
        dtype: its dtype at both ends.
    """

    name: str
    ends: Ends
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The bytes of the whole value."""
        return math.prod(self.ends.shape) * self.dtype.itemsize

    @staticmethod
    def of(name: str, source: TensorType, target: TensorType) -> Crossed:
        assert source.dtype == target.dtype, name
        return Crossed(name, Ends(source.shape, source.placed, target.placed), source.dtype)


class PackedBox(NamedTuple):
    """A box in the message from or to another rank, and its bytes there."""

    other: int
    first: int
    end: int


class Bundle:
    """One rank's part of the messages with the values of a bundle, in their order.

    Attributes:
        sends: receiver → bytes of the message to it.
        receives: sender → bytes of the message from it.
    """

    def __init__(self, values: Sequence[Crossed], rank: int) -> None:
        self.values = tuple(values)
        self._plans = [packing(value.ends, rank) for value in values]
        self.sends, _ = self._sizes([plan.sends for plan in self._plans])
        self.receives, self._boxes = self._sizes([plan.receives for plan in self._plans])
        self._whole = [  # the shape of a piece that is one box; ``None`` if it has several parts
            plan.shape if len(plan.receives) == 1 and box_shape(plan.receives[0][1]) == plan.shape else None
            for plan in self._plans
        ]

    def _sizes(self, ends: Sequence[Sequence[tuple[int, Places]]]) -> tuple[dict[int, int], list[list[PackedBox]]]:
        """Return the bytes of each message, and the boxes of each value."""
        sizes: dict[int, int] = {}
        found: list[list[PackedBox]] = []
        for value, boxes in zip(self.values, ends, strict=True):
            found.append([])
            for other, places in boxes:
                at, size = sizes.get(other, 0), size_of(places) * value.dtype.itemsize
                found[-1].append(PackedBox(other, at, at + size))
                sizes[other] = at + _aligned(size)
        return sizes, found

    def pack(self, pieces: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the message to each receiver, as bytes.

        Args:
            pieces: this rank's pieces of the values. A message may share the memory of a piece.
        """
        boxes: dict[int, list[torch.Tensor]] = {}
        for plan, piece in zip(self._plans, pieces, strict=True):
            for receiver, places in plan.sends:
                boxes.setdefault(receiver, []).append(as_bytes(take(piece, places)))
        return {receiver: _joined(parts) for receiver, parts in boxes.items()}

    def unpack(self, received: Mapping[int, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Return the new pieces.

        Args:
            received: sender → its message. A piece may share the memory of a message.
        """
        pieces = []
        for value, plan, parts, whole in zip(self.values, self._plans, self._boxes, self._whole, strict=True):
            boxes = [from_bytes(received[part.other][part.first : part.end], value.dtype) for part in parts]
            if whole is not None:
                pieces.append(boxes[0].view(whole))
            else:
                pieces.append(new_piece(plan, value.dtype, device, None, boxes))
        return pieces


def _aligned(bytes: int) -> int:
    return math.ceil(bytes / ALIGNED) * ALIGNED


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join boxes to one message, each at a multiple of ``ALIGNED``."""
    if len(parts) == 1 and len(parts[0]) % ALIGNED == 0:
        return parts[0]
    message = parts[0].new_empty(sum(_aligned(len(part)) for part in parts))
    at = 0
    for part in parts:
        message[at : at + len(part)] = part
        at += _aligned(len(part))
    return message
