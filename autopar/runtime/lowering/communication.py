"""Write the starts of collectives and the waits for them, for whole transfers, chunks and buckets.

y_start : f32[16 256] = start all_gather(h, 1, tp, …) on tp   →   y_start = start_all_gather(h, (16, 128), 1, …, '3')
y : f32[16 256] = wait(y_start)                                   y = finish_all_gather(y_start, …)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.errors import SimulationError
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.streams import DEFAULT, Groups, Ranks, group_key, stream_of
from autopar.ir.value_names import started_states
from autopar.runtime.lowering.body import Body
from autopar.runtime.lowering.bucket_collectives import (
    Place,
    Span,
    finish_bucket,
    finish_gather_bucket,
    finish_scatter_bucket,
    start_bucket,
    start_gather_bucket,
    start_scatter_bucket,
)
from autopar.runtime.lowering.collectives import (
    Exchange,
    exchange,
    flat_view,
    redistribution,
    start_all_reduce,
    start_all_reduce_in_place,
)
from autopar.runtime.lowering.packing import packing
from autopar.runtime.lowering.point_to_point import exchange_between_stages
from autopar.runtime.lowering.reduction import Reduction
from autopar.runtime.lowering.side_streams import Starts
from autopar.runtime.lowering.waits import members


class Communication:
    """Writes the communication of one function.

    Args:
        groups: the names of the process groups.
        device: the device on which collectives run and receive.
    """

    def __init__(self, body: Body, groups: Groups, device: torch.device) -> None:
        self.body, self.groups, self.device, self.program = body, groups, device, body.program
        self.starts = Starts(body, device)
        # the first member of a message that was started → its value, and what finishes it if that is known
        self.started: dict[fx.Node, tuple[fx.Node, Exchange | None]] = {}
        # state that the run before has started → its next value, the start of the same collective
        self.nexts: dict[fx.Node, fx.Node] = {}

    def take_under_way(self, takes: Sequence[fx.Node]) -> None:
        """Take the collectives that the run before has started: of each message, its first member."""
        self.nexts = started_states(self.program)
        for node in takes:
            if node in self.nexts:
                self.started[node] = self.body.values[node], None
                self.starts.take_under_way(self.body.values[node])

    def start(self, members: Sequence[fx.Node]) -> None:
        """Write the start of a message. ``members``: the lines that start it."""
        body, first, collective = self.body, members[0], self._exchange(members)
        sent = values, _ = self.starts.sent(
            members, [f"{_waited(node)}_operand" for node in members], collective.before
        )
        start, x = collective.start, values[0]
        is_last = body.is_last_of(operands(first)[0]) and body.hunt is None
        if start is start_all_reduce and (collective.before or is_last):
            start = start_all_reduce_in_place
        if first.target is transfers.redistribute:
            collective = replace(collective, finish_args=(x, *collective.finish_args))
        body.open_gate()
        name, operand = ("start", x) if _is_whole(members) else ("bucket", values)
        value = self.starts.call(first, f"{_waited(first)}_{name}", start, (operand, *collective.start_args), sent)
        body.values[first] = value
        self.started[first] = value, collective

    def finish(self, members: Sequence[fx.Node], waits: Sequence[fx.Node]) -> None:
        """Write the wait for a message. ``members``: the lines that started it; ``waits``: those that wait for them."""
        body, started = self.body, [self.nexts.get(node, node) for node in members]
        value, known = self.started.pop(members[0])
        collective = known or self._exchange(started)
        if value in self.starts.aside:
            _, group = group_of(self.program, started[0], self.groups)
            self.starts.wait(value, group)
        if _is_whole(started):
            body.receive(waits[0], collective.finish, (value, *collective.finish_args), collective.after)
        else:
            name = f"{waits[0].name}_pieces"
            pieces = body.call(members[0], name, collective.finish, (value, *collective.finish_args))
            for k, wait in enumerate(waits):
                body.receive(wait, operator.getitem, (pieces, k), collective.after)
        body.fresh.update(waits)

    def between_stages(self, node: fx.Node) -> None:
        """Write a send or a recv: one call that also waits."""
        plan = packing(transfers.Ends.of(_arguments(node), self.program.meshes), self.program.rank)
        x = self.body.operand(node) if operands(node) else None
        self.body.open_gate()
        args = x, plan, tensor_type(node).dtype, self.device, self._group_of_all(node)
        self.body.values[node] = self.body.call(node, node.name, exchange_between_stages, args)

    def _group_of_all(self, node: fx.Node) -> str | None:
        """Return the name of the process group for messages between stages; ``None``: the default group."""
        ranks, stream = self.program.meshes[None].ranks, stream_of(record_of(node).stream, None)
        if stream == DEFAULT:
            return self.groups.get(group_key(ranks, stream))
        return group_name(node, ranks, stream, self.groups)

    def _exchange(self, members: Sequence[fx.Node]) -> Exchange:
        """Return the collective of a message: of a whole transfer, or of a bucket, whose members are reduced alike."""
        program, first = self.program, members[0]
        if _is_whole(members):
            return exchange_of(program, first, self.groups)
        ranks, group = group_of(program, first, self.groups)
        spans, shapes = tuple(map(_span, members)), [tuple(tensor_type(node).shape) for node in members]
        if first.target is transfers.all_gather:
            return Exchange(start_gather_bucket, (spans, len(ranks), group),
                            finish_gather_bucket, (_received(members, len(ranks)),))  # fmt: skip
        kind, dtype = _arguments(first).get("op", "sum"), tensor_type(first).dtype
        op, before, after = Reduction.of(kind, dtype, len(ranks))
        if first.target is transfers.all_reduce:
            return Exchange(start_bucket, (spans, op, group), finish_bucket, (shapes,), before, after)
        finish_args = _received(members, len(ranks)), ranks.index(program.rank)
        return Exchange(start_scatter_bucket, (_places(members), len(ranks), op, group),
                        finish_scatter_bucket, finish_args, before, after)  # fmt: skip


def _is_whole(members: Sequence[fx.Node]) -> bool:
    """Return whether a message is one whole transfer: no bucket and no chunk."""
    return len(members) == 1 and record_of(members[0]).span is None


def _span(node: fx.Node) -> Span:
    """Return the span of a chunk; ``None`` for a whole transfer."""
    span = record_of(node).span
    if span is None:
        return None
    elements = math.prod(tensor_type(operands(node)[0]).shape)
    if node.target is transfers.reduce_scatter:
        elements //= len(_arguments(node)["sizes"])
    return (*span, elements)


def _waited(started: fx.Node) -> str:
    """Return the name of the value that the wait for a collective computes."""
    if not record_of(started).started:
        return started.name
    reader = next(iter(started.users))
    return reader.name if reader.target is transfers.wait else started.name.removesuffix("_start")


def exchange_of(program: Program, node: fx.Node, groups: Groups) -> Exchange:
    """Return the collective of a transfer of a rank's program.

    Args:
        groups: the names of the process groups.

    Raises:
        SimulationError: the ranks of the group are not in ascending order.
    """
    arguments, source = _arguments(node), tensor_type(operands(node)[0])
    ranks, group = group_of(program, node, groups)
    if node.target is transfers.redistribute:
        ends = transfers.Ends.of(arguments, program.meshes)
        plan = packing(ends, program.rank, arguments.get("kept", ()))
        return redistribution(plan, sorted(ranks), source.dtype, group)
    if node.target is not transfers.all_reduce and list(ranks) != sorted(ranks):
        raise SimulationError(
            f"the ranks {ranks} of a group are not in ascending order along {arguments['axis']}; number the mesh "
            f"so that the ranks of each group ascend along its axes"
        )
    index, result = ranks.index(program.rank), tensor_type(node).shape
    return exchange(node.target, arguments, source.shape, result, source.dtype, index, len(ranks), group)


def group_of(program: Program, node: fx.Node, groups: Groups) -> tuple[Ranks, str]:
    """Return the ranks of a collective, in the order of its axes, and the name of their process group, whose order is
    ascending."""
    ranks = members(program, node)
    return ranks, group_name(node, ranks, stream_of(record_of(node).stream, _arguments(node)["axis"]), groups)


def group_name(node: fx.Node, ranks: Ranks, stream: str, groups: Groups) -> str:
    """Return the name of the process group of a stream.

    Raises:
        SimulationError: no group was made for it.
    """
    try:
        return groups[group_key(ranks, stream)]
    except KeyError:
        raise SimulationError(
            f"{node.name} runs{f' on {stream}' if stream else ''} among the ranks {sorted(ranks)}, which have no "
            f"process group for that; all ranks make it before a program is lowered, with groups_for(job, programs)"
        ) from None


def _arguments(node: fx.Node) -> dict[str, Any]:
    return transfers.arguments(node.target, node.args, node.kwargs)


def _places(members: Sequence[fx.Node]) -> tuple[Place, ...]:
    return tuple(
        (
            flat_view(arguments := _arguments(node), tensor_type(operands(node)[0]).shape),
            arguments["dim"],
            tuple(tensor_type(node).shape),
            _span(node),
        )
        for node in members
    )


def _received(members: Sequence[fx.Node], ranks: int) -> tuple[Place, ...]:
    """Return the places of what is received: of a chunk, a row of its elements for each rank."""
    return tuple(
        place if place[3] is None else ((ranks * (place[3][1] - place[3][0]),), *place[1:])
        for place in _places(members)
    )
