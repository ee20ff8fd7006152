"""Write the starts of collectives and the waits for them, for whole transfers, chunks and buckets.

y_start : f32[16 256] = start all_gather(h, 1, tp, …) on tp   →   y_start = start_all_gather(h, (16, 128), 1, …, '3')
y : f32[16 256] = wait(y_start)                                   y = finish_all_gather(y_start, …)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.errors import SimulationError
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.states import started_states
from autopar.ir.streams import DEFAULT, Groups, Ranks, group_key, stream_of
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

Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments after the tensor


class Communication:
    """Writes the communication of one function.

    Args:
        groups: the names of the process groups.
        device: the device on which collectives run and receive.
    """

    def __init__(self, body: Body, groups: Groups, device: torch.device) -> None:
        self.body, self.groups, self.device, self.program = body, groups, device, body.program
        self.starts = Starts(body, device)
        self.started: dict[fx.Node, tuple[fx.Node, Exchange]] = {}
        self.buckets: dict[fx.Node, fx.Node] = {}  # the first member of a bucket that was started → its flat tensor
        # state that the run before has started → its next value, the start of the same collective
        self.nexts: dict[fx.Node, fx.Node] = {}

    def take_under_way(self, takes: Sequence[fx.Node]) -> None:
        """Take the collectives that the run before has started: of each message, its first member."""
        self.nexts = started_states(self.program)
        for node in takes:
            if node not in self.nexts:
                continue
            value = self.buckets[node] = self.body.values[node]
            self.starts.take_under_way(value)
            if _is_whole([node]) and not record_of(node).message:
                self.started[node] = value, exchange_of(self.program, self.nexts[node], self.groups)

    def start(self, members: Sequence[fx.Node]) -> None:
        """Write the start of a message. ``members``: the lines that start it."""
        if _is_whole(members):
            self._start_one(members[0])
        else:
            self._start_bucket(members)

    def finish(self, members: Sequence[fx.Node], waits: Sequence[fx.Node]) -> None:
        """Write the wait for a message. ``members``: the lines that started it; ``waits``: those that wait for them."""
        if _is_whole(members):
            started, collective = self.started.pop(members[0])
            self._wait(started, members[0])
            self.body.receive(waits[0], collective.finish, (started, *collective.finish_args), collective.after)
            self.body.fresh.add(waits[0])
        else:
            self._finish_bucket(members, waits)

    def between_stages(self, node: fx.Node) -> None:
        """Write a send or a recv: one call that also waits."""
        plan = packing(transfers.Ends.of(_arguments(node), self.program.meshes), self.program.rank)
        x = self.body.operand(node) if operands(node) else None
        self.body.open_gate()
        args = x, plan, tensor_type(node).dtype, self.device, self._group_of_all(node)
        self.body.values[node] = self.body.call(node, node.name, exchange_between_stages, args)

    # -- one transfer --------------------------------------------------------------------------------------------------

    def _start_one(self, node: fx.Node) -> None:
        body, (operand,) = self.body, operands(node)
        collective = exchange_of(self.program, node, self.groups)
        sent = (x,), _ = self.starts.sent([node], [f"{_waited(node)}_operand"], collective.before)
        start = collective.start
        if start is start_all_reduce and (collective.before or (body.is_last_of(operand) and body.hunt is None)):
            start = start_all_reduce_in_place
        if node.target is transfers.redistribute:
            collective = replace(collective, finish_args=(x, *collective.finish_args))
        body.open_gate()
        name = f"{_waited(node)}_start"
        value = body.values[node] = self.starts.call(node, name, start, (x, *collective.start_args), sent)
        self.started[node] = value, collective

    def _wait(self, started: fx.Node, node: fx.Node) -> None:
        if started in self.starts.aside:
            _, group = self._group(self.nexts.get(node, node))
            self.starts.wait(started, group)

    def _group(self, node: fx.Node) -> tuple[Ranks, str]:
        return group_of(self.program, node, self.groups)

    def _group_of_all(self, node: fx.Node) -> str | None:
        """Return the name of the process group for messages between stages; ``None``: the default group."""
        ranks, stream = self.program.meshes[None].ranks, stream_of(record_of(node).stream, None)
        if stream == DEFAULT:
            return self.groups.get(group_key(ranks, stream))
        return group_name(node, ranks, stream, self.groups)

    # -- a bucket ------------------------------------------------------------------------------------------------------

    def _start_bucket(self, members: Sequence[fx.Node]) -> None:
        body, first = self.body, members[0]
        names = (f"{_waited(node)}_operand" for node in members)
        sent = pieces, _ = self.starts.sent(members, names, self._reduction(first).before)
        body.open_gate()
        start, args = self._starting(members)
        bucket = self.starts.call(first, f"{_waited(first)}_bucket", start, (pieces, *args), sent)
        self.buckets[first] = body.values[first] = bucket

    def _finish_bucket(self, members: Sequence[fx.Node], waits: Sequence[fx.Node]) -> None:
        body, first = self.body, members[0]
        started = [self.nexts.get(node, node) for node in members]
        finish, args = self._finishing(started)
        bucket = self.buckets.pop(first)
        self._wait(bucket, first)
        pieces = body.call(first, f"{waits[0].name}_pieces", finish, (bucket, *args))
        for k, (node, wait) in enumerate(zip(started, waits, strict=True)):
            body.receive(wait, operator.getitem, (pieces, k), self._reduction(node).after)
            body.fresh.add(wait)

    def _starting(self, members: Sequence[fx.Node]) -> Call:
        first = members[0]
        ranks, group = self._group(first)
        spans = tuple(map(_span, members))
        if first.target is transfers.all_gather:
            return start_gather_bucket, (spans, len(ranks), group)
        op = self._reduction(first).op
        if first.target is transfers.all_reduce:
            return start_bucket, (spans, op, group)
        return start_scatter_bucket, (_places(members), len(ranks), op, group)

    def _finishing(self, members: Sequence[fx.Node]) -> Call:
        first = members[0]
        if first.target is transfers.all_reduce:
            return finish_bucket, ([tuple(tensor_type(node).shape) for node in members],)
        ranks, _ = self._group(first)
        places = tuple(
            place if place[3] is None else ((len(ranks) * (place[3][1] - place[3][0]),), *place[1:])
            for place in _places(members)
        )
        if first.target is transfers.all_gather:
            return finish_gather_bucket, (places,)
        return finish_scatter_bucket, (places, ranks.index(self.program.rank))

    def _reduction(self, node: fx.Node) -> Reduction:
        """Return how the bucket of a transfer is reduced; a gather reduces nothing."""
        if node.target is transfers.all_gather:
            return Reduction("")
        op = _arguments(node).get("op", "sum")
        return Reduction.of(op, tensor_type(node).dtype, len(self._group(node)[0]))


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
