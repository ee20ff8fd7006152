"""Price the operations of a process group in seconds, by the closed forms that plans and schedules use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from autopar.costs.machine import Link, Machine
from autopar.costs.prices import price
from autopar.ir.mesh import MOST_RANKS

Bytes = Callable[[Sequence[Any], int], int]  # the arguments of the operation and the number of ranks → bytes


@dataclass(frozen=True)
class Charge:
    """How an operation is charged.

    Attributes:
        form: the transfer whose closed forms price it.
        bytes: the bytes ``n`` of the closed forms, as in ``autopar.costs.prices``.
    """

    form: str
    bytes: Bytes


def bytes_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(bytes_of, tensors))


def _first(arguments: Sequence[Any], ranks: int) -> int:
    return bytes_of(arguments[0])


def _second(arguments: Sequence[Any], ranks: int) -> int:
    return bytes_of(arguments[1])


def _larger(arguments: Sequence[Any], ranks: int) -> int:
    return max(bytes_of(arguments[0]), bytes_of(arguments[1]))


def _nothing(arguments: Sequence[Any], ranks: int) -> int:
    return 0


def _to_root(arguments: Sequence[Any], ranks: int) -> int:
    """Return the bytes that the root of a gather receives; the second argument is this rank's piece."""
    return (ranks - 1) * bytes_of(arguments[1])


def _from_root(arguments: Sequence[Any], ranks: int) -> int:
    return (ranks - 1) * bytes_of(arguments[0])


ALL_GATHER, REDUCE_SCATTER = Charge("all_gather", _first), Charge("reduce_scatter", _second)

# methods of ProcessGroup, with the names of torch 2.13
CHARGES: dict[str, Charge] = {
    "allreduce": Charge("all_reduce", _first),
    "allreduce_coalesced": Charge("all_reduce", _first),
    "allgather": ALL_GATHER,
    "allgather_coalesced": ALL_GATHER,
    "all_gather_single": ALL_GATHER,
    "all_gather_single_coalesced": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "reduce_scatter_single": REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": REDUCE_SCATTER,
    "alltoall": Charge("all_to_all", _larger),
    "all_to_all_single": Charge("all_to_all", _larger),
    # one rank sends or receives all bytes, in a pipeline: (p - 1) a + n b
    "broadcast": Charge("redistribute", _first),
    "reduce": Charge("redistribute", _first),
    "gather": Charge("redistribute", _to_root),
    "scatter": Charge("redistribute", _from_root),
    "barrier": Charge("all_reduce", _nothing),  # the latency of an empty all-reduce
    "send": Charge("send", _first),
    "recv": Charge("send", _first),
    "recv_anysource": Charge("send", _first),
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
    if name in ("alltoall", "all_to_all_single"):
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
