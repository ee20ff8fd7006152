"""Change one thing that a collective of one rank sends: each change is to be refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.errors import ChannelError
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of, set_record
from autopar.ir.program import Program
from autopar.verify.channels.programs import check_programs


def retyped(node: fx.Node, **changes: Any) -> None:
    """What the transfer reads, and what it makes, has another type."""
    for value in (*operands(node), node):
        record = record_of(value)
        set_record(value, record._replace(type=replace(record.type, **changes)))


def argued(name: str, change: Callable[[Any], Any]) -> Callable[[fx.Node], bool]:
    """Another argument, where the transfer has it and it becomes another."""

    def mutate(node: fx.Node) -> bool:
        given = transfers.arguments(node.target, node.args, node.kwargs)
        if given.get(name) is None and name != "op":
            return False
        new = change(given.get(name))
        if new == given.get(name):
            return False
        node.args, node.kwargs = transfers.call(node.target, node.args[0], {**given, name: new})
        return True

    return mutate


def another_dtype(node: fx.Node) -> bool:
    dtype = record_of(node).type.dtype
    retyped(node, dtype=torch.float16 if dtype is torch.bfloat16 else torch.bfloat16)
    return True


def another_shape(node: fx.Node) -> bool:
    operand = record_of(node.args[0]).type if isinstance(node.args[0], fx.Node) else None
    if operand is None or not operand.shape or node.target in (transfers.send, transfers.recv, transfers.redistribute):
        return False
    set_record(
        node.args[0],
        record_of(node.args[0])._replace(type=replace(operand, shape=(operand.shape[0] + 1, *operand.shape[1:]))),
    )
    return True


def longer(sizes: Any) -> Any:
    return [*sizes[:-1], sizes[-1] + 1]


def swapped_ends(sizes: Any) -> Any:
    return [*sizes[:-1][1:], sizes[-1], sizes[0]]


MUTATIONS: dict[str, Callable[[fx.Node], bool]] = {
    "dtype": another_dtype,
    "shape": another_shape,
    "reduction": lambda node: (
        node.target in (transfers.all_reduce, transfers.reduce_scatter)
        and argued("op", lambda op: "min" if op == "max" else "max")(node)
    ),
    "size of a piece": argued("sizes", longer),
    "sizes in another order": argued("sizes", swapped_ends),
    "new sizes": argued("new_sizes", longer),
    "global shape": argued("shape", lambda shape: (*shape[:-1], shape[-1] + 1) if shape else shape),
    "splits": argued("splits", lambda splits: tuple(reversed(splits))),
    "source": argued("source", lambda source: source if isinstance(source, int) else tuple(reversed(source))),
}


def communicating(program: Program) -> Iterator[fx.Node]:
    for node in program.nodes:
        row = transfers.BY_FUNCTION.get(node.target)
        if row is not None and row.collective:
            yield node


def alone(program: Program, node: fx.Node) -> bool:
    """Whether nothing travels."""
    axis = transfers.arguments(node.target, node.args, node.kwargs).get("axis")
    return axis is not None and program.mesh.count(transfers.axes_of(axis)) == 1


def accepted(programs: Mapping[int, Program], count: int, choose: random.Random) -> list[str]:
    """Of ``count`` changes drawn at random those that are not refused; the programs stay as they are."""
    texts = {rank: str(program) for rank, program in programs.items()}
    whole = {rank: Program.parse(text) for rank, text in texts.items()}
    check_programs(whole)
    places = [
        (rank, node.name)
        for rank, program in whole.items()
        for node in communicating(program)
        if not alone(program, node)
    ]
    missed = []
    for rank, name in choose.choices(places, k=count) if places else ():
        kind = choose.choice(list(MUTATIONS))
        broken = Program.parse(texts[rank])
        if not MUTATIONS[kind](broken.node(name)):
            continue
        try:
            check_programs({**whole, rank: broken})
        except ChannelError:
            continue
        missed.append(f"another {kind} of {name} on rank {rank}")
    return missed
