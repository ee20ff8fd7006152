"""Plan which parts of its piece a rank sends in an exchange, and where it puts the parts that it receives.

An exchange between two Layouts (``redistribute``, ``send`` and ``recv``) is planned once for a rank, from the boxes of
``autopar.ir.boxes``. At run time there are only slices, one concatenation, and a view as bytes. Each dtype is sent at
its own width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from autopar.ir.boxes import Box, Runs, box_of, count, overlap, volume, within
from autopar.ir.messages import Message, messages
from autopar.ir.transfers import Ends

Places = tuple[Runs, ...]  # positions in a piece, dim by dim


class Packing(NamedTuple):
    """One rank's part of an exchange; a tuple of tuples, so that generated code can hold it.

    Attributes:
        sends: (receiver, positions in the old piece), in the order of all messages.
        receives: (sender, positions in the new piece), in the order of all messages.
        order: (whether it is a send, index into ``sends`` or ``receives``), in the order in which the rank sends and
            receives.
        keeps: the positions, in the old and in the new piece, of the elements that the rank keeps; ``None`` if it keeps
            none.
        shape: the shape of the new piece; ``None`` if the rank gets none.
    """

    sends: tuple[tuple[int, Places], ...]
    receives: tuple[tuple[int, Places], ...]
    order: tuple[tuple[bool, int], ...]
    keeps: tuple[Places, Places] | None
    shape: tuple[int, ...] | None


def packing(ends: Ends, rank: int, kept: tuple[str, ...] = ()) -> Packing:
    """Plan the part of ``rank`` in an exchange."""
    old = box_of(ends.source, ends.shape, rank) if rank in ends.source.mesh else None
    new = box_of(ends.target, ends.shape, rank) if rank in ends.target.mesh else None
    sends: list[tuple[int, Places]] = []
    receives: list[tuple[int, Places]] = []
    order = []
    for message in messages_of(ends, kept):
        if message.sender == rank:
            assert old is not None
            order.append((True, len(sends)))
            sends.append((message.receiver, _places(message.box, old)))
        elif message.receiver == rank:
            assert new is not None
            order.append((False, len(receives)))
            receives.append((message.sender, _places(message.box, new)))
    keeps = None
    if old is not None and new is not None:
        both = tuple(map(overlap, old, new))
        if volume(both):
            keeps = _places(both, old), _places(both, new)
    return Packing(tuple(sends), tuple(receives), tuple(order), keeps, None if new is None else tuple(map(count, new)))


def messages_of(ends: Ends, kept: tuple[str, ...] = ()) -> tuple[Message, ...]:
    """Return all messages of an exchange, of all ranks."""
    return messages(ends.source, ends.target, ends.shape, kept)


def _places(box: Box, piece: Box) -> Places:
    return tuple(map(within, box, piece))


def size_of(places: Places) -> int:
    """Return the number of elements at ``places``."""
    return math.prod(map(count, places))


def take(x: torch.Tensor, places: Places) -> torch.Tensor:
    """Return the elements at ``places`` as one box."""
    for dim, runs in enumerate(places):
        if len(runs) == 1:
            first, end = runs[0]
            x = x if (first, end) == (0, x.shape[dim]) else x.narrow(dim, first, end - first)
        else:
            x = torch.cat([x.narrow(dim, a, b - a) for a, b in runs], dim)
    return x


def put(out: torch.Tensor, places: Places, box: torch.Tensor) -> None:
    """Write a box to ``places``."""
    split = next((dim for dim, runs in enumerate(places) if len(runs) > 1), None)
    if split is None:
        for dim, ((a, b),) in enumerate(places):
            out = out.narrow(dim, a, b - a)
        out.copy_(box)
        return
    for run, piece in zip(places[split], box.split([b - a for a, b in places[split]], split), strict=True):
        put(out, (*places[:split], (run,), *places[split + 1 :]), piece)


def box_shape(places: Places) -> tuple[int, ...]:
    return tuple(map(count, places))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any dtype, flat."""
    x = x.contiguous().reshape(-1)
    return (torch.view_as_real(x).reshape(-1) if x.is_complex() else x).view(torch.uint8)


def from_bytes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the inverse of ``as_bytes``."""
    return torch.view_as_complex(x.view(dtype.to_real()).reshape(-1, 2)) if dtype.is_complex else x.view(dtype)


def new_piece(plan: Packing, dtype: torch.dtype, device: torch.device, old: torch.Tensor | None,
              received: Sequence[torch.Tensor]) -> torch.Tensor:  # fmt: skip
    """Assemble the new piece from the kept elements and the received boxes."""
    assert plan.shape is not None
    out = torch.empty(plan.shape, dtype=dtype, device=device)
    if plan.keeps is not None:
        assert old is not None
        put(out, plan.keeps[1], take(old, plan.keeps[0]))
    for (_, places), box in zip(plan.receives, received, strict=True):
        put(out, places, box.reshape(box_shape(places)))
    return out
