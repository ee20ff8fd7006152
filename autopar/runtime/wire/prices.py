"""Price the operations of a process group in seconds, by the closed forms that plans and schedules use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from autopar.costs.machine import Link, Machine
from autopar.costs.prices import price
from autopar.ir.mesh import MOST_RANKS


class Charge(NamedTuple):
    """How an operation is charged.

    Attributes:
        form: the transfer whose closed forms price it.
        counted: the positions of the arguments whose bytes are the ``n`` of the closed forms, as in
            ``autopar.costs.prices``; of several the larger ones.
        for_others: whether the root sends or receives these bytes for each other rank.
    """

    form: str
    counted: tuple[int, ...] = (0,)
    for_others: bool = False

    def bytes(self, arguments: Sequence[Any], ranks: int) -> int:
        """Return the bytes of an operation with these arguments on so many ranks."""
        counted = max((bytes_of(arguments[k]) for k in self.counted), default=0)
        return (ranks - 1) * counted if self.for_others else counted


def bytes_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(bytes_of, tensors))


ALL_GATHER, REDUCE_SCATTER = Charge("all_gather"), Charge("reduce_scatter", (1,))
ALL_TO_ALL = Charge("all_to_all", (0, 1))

# methods of ProcessGroup, with the names of torch 2.13
CHARGES: dict[str, Charge] = {
    "allreduce": Charge("all_reduce"),
    "allreduce_coalesced": Charge("all_reduce"),
    "allgather": ALL_GATHER,
    "allgather_coalesced": ALL_GATHER,
    "all_gather_single": ALL_GATHER,
    "all_gather_single_coalesced": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "reduce_scatter_single": REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": REDUCE_SCATTER,
    "alltoall": ALL_TO_ALL,
    "all_to_all_single": ALL_TO_ALL,
    # one rank sends or receives all bytes, in a pipeline: (p - 1) a + n b
    "broadcast": Charge("redistribute"),
    "reduce": Charge("redistribute"),
    "gather": Charge("redistribute", (1,), for_others=True),  # the second argument is this rank's piece
    "scatter": Charge("redistribute", for_others=True),
    "barrier": Charge("all_reduce", ()),  # the latency of an empty all-reduce
    "send": Charge("send"),
    "recv": Charge("send"),
    "recv_anysource": Charge("send"),
}


@lru_cache(maxsize=16)
def machine_of(latency: float, bandwidth: float) -> Machine:
    """Return a machine whose ranks all share one node, with links of this latency and bandwidth.

    The ranks of a group have links of one kind: within a host, or between hosts.
    """
    link = Link(latency, bandwidth)
    return Machine("wire", "cpu", MOST_RANKS, link, link, link)


@lru_cache(maxsize=65536)
def seconds(form: str, bytes: int, ranks: int, machine: Machine) -> float:
    """Return the seconds of a transfer; 0 on one rank."""
    return float(price(form, bytes, ranks, machine)) if ranks > 1 else 0.0


def charged(name: str, arguments: Sequence[Any], ranks: int, machine: Machine) -> tuple[int, float]:
    """Return the bytes and the seconds that a method of a process group is charged with.

    Args:
        name: the method, a key of ``CHARGES``.
        arguments: its positional arguments.
        ranks: the members of the group.
    """
    if CHARGES[name] is ALL_TO_ALL:
        exchange = _uneven(name, arguments, ranks)
        if exchange is not None:
            size, partners = exchange
            return size, seconds("redistribute", size, partners, machine)
    charge = CHARGES[name]
    size = charge.bytes(arguments, ranks)
    return size, seconds(charge.form, size, ranks, machine)


def _uneven(name: str, arguments: Sequence[Any], ranks: int) -> tuple[int, int] | None:
    """Return the bytes that this rank exchanges where pieces differ, and the number of its partners, itself included.

    ``None`` if all pieces have one size. The bytes are those sent or those received, whichever are more.
    """
    sides = [_pieces(name, arguments, side, ranks) for side in (0, 1)]
    if all(len(set(side)) <= 1 for side in sides):
        return None
    most = max(sides, key=sum)
    return sum(most), max(1, *(sum(piece > 0 for piece in side) for side in sides))


def _pieces(name: str, arguments: Sequence[Any], side: int, ranks: int) -> list[int]:
    """Return the bytes of each piece of the output, ``side`` 0, or of the input, ``side`` 1."""
    if name == "alltoall":
        return [bytes_of(tensor) for tensor in arguments[side]]
    tensor, splits = arguments[side], list(arguments[2 + side] or ())
    width = bytes_of(tensor) // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return [rows * width for rows in splits] or [bytes_of(tensor) // ranks] * ranks
