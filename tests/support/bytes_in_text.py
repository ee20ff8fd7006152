"""Count the bytes that a rank of a pipelined step sends and receives: by the lines of its programs, and as sent."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any
from unittest import mock

from pipelined_steps import MESHES, made
from steps import run
from torch import distributed

from autopar.ir import transfers
from autopar.ir.nodes import record_of, tensor_type
from autopar.ir.program import Program
from autopar.runtime.lowering.packing import messages_of

ALIGNED = 16  # in a message of several values, each begins at a multiple
Bytes = Counter[tuple[int, str]]  # (other rank, phase) → bytes


def in_text(local: Program, rank: int, aligned: int = ALIGNED) -> tuple[Bytes, Bytes]:
    """The bytes that a rank sends and receives in one run of a program, by its lines."""
    sent, received = Bytes(), Bytes()
    for node in local.nodes:
        if node.target not in (transfers.send, transfers.recv):
            continue
        ends = transfers.Ends.of(transfers.arguments(node.target, node.args, node.kwargs), local.meshes)
        size, phase = tensor_type(node).dtype.itemsize, record_of(node).phase
        for message in messages_of(ends):
            elements = prod(sum(b - a for a, b in runs) for runs in message.box)
            bytes = -(-elements * size // aligned) * aligned
            if message.sender == rank:
                sent[message.receiver, phase] += bytes
            if message.receiver == rank:
                received[message.sender, phase] += bytes
    return sent, received


def of_step(step: Any, rank: int, microbatches: int) -> tuple[Counter[int], Counter[int]]:
    """The bytes that a rank sends and receives in a step, by the lines of all its programs: other rank → bytes."""
    sent, received = Counter[int](), Counter[int]()
    for name, program in step.local(rank).programs.items():
        slots = name == "micro"
        for total, one in zip((sent, received), in_text(program, rank, ALIGNED if slots else 1), strict=True):
            for (other, _), bytes in one.items():
                total[other] += bytes * (microbatches if slots else 1)
    return sent, received


def as_sent(cases: list[tuple[str, str, str]], **options: Any) -> None:
    """On each rank: what torch is given to send and to receive in a step is what the text says."""
    for name, mesh, policy in cases:
        step, _, batches = made(name, MESHES[mesh], policy, 4, layers=8, **options)
        run(step, batches(0))
        found: dict[str, Counter[int]] = {"isend": Counter(), "irecv": Counter()}

        def counted(which: str, original: Any, found: Any = found) -> Any:
            def call(tensor: Any, other: int, *rest: Any) -> Any:
                found[which][other] += tensor.nbytes
                return original(tensor, other, *rest)

            return call

        with (
            mock.patch.object(distributed, "isend", counted("isend", distributed.isend)),
            mock.patch.object(distributed, "irecv", counted("irecv", distributed.irecv)),
        ):
            run(step, batches(1))
        wanted = of_step(step, distributed.get_rank(), 4)
        assert wanted[0] or wanted[1]
        assert (found["isend"], found["irecv"]) == wanted, (name, mesh, policy)
        step.parallel.close()
