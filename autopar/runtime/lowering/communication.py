"""Write the lines that start a collective and that wait for it, for one transfer or for a bucket.

y : f32[16 256] = all_gather(h, 1, tp, sizes=…)  →  y_start = start_all_gather(h, (16, 128), 1, (128, 128), '3')
                                                             y = finish_all_gather(y_start, …)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.errors import SimulationError
from autopar.ir import transfers
from autopar.ir.nodes import operands, tensor_type
from autopar.ir.program import Program
from autopar.runtime.lowering.body import Body
from autopar.runtime.lowering.bucket_collectives import (
    Place,
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
    exchange_between_stages,
    flat_view,
    redistribution,
    start_all_reduce,
    start_all_reduce_in_place,
)
from autopar.runtime.lowering.packing import packing
from autopar.runtime.lowering.reduction import Reduction

Ranks = tuple[int, ...]
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments after the tensor


class Communication:
    """Writes the communication of one function.

    Args:
        groups: ranks, in ascending order → the name of their process group.
        device: the device that receives values of another stage.
    """

    def __init__(self, body: Body, groups: Mapping[Ranks, str], device: torch.device) -> None:
        self.body, self.groups, self.device, self.program = body, groups, device, body.program
        self.started: dict[fx.Node, tuple[fx.Node, Exchange]] = {}
        self.buckets: dict[fx.Node, fx.Node] = {}  # the first member of a bucket that was started → its flat tensor

    def start(self, members: Sequence[fx.Node]) -> None:
        """Start the collective of one transfer, or of a bucket of them."""
        if len(members) == 1:
            self._start_one(members[0])
        else:
            self._start_bucket(members)

    def finish(self, members: Sequence[fx.Node]) -> None:
        """Wait for a collective; split a bucket into its members."""
        if len(members) == 1:
            started, collective = self.started.pop(members[0])
            self.body.receive(members[0], collective.finish, (started, *collective.finish_args), collective.after)
        else:
            self._finish_bucket(members)

    def between_stages(self, node: fx.Node) -> None:
        """Write a send or a recv: one call that also waits."""
        plan = packing(transfers.Ends.of(_arguments(node), self.program.meshes), self.program.rank)
        x = self.body.operand(node) if operands(node) else None
        self.body.open_gate()
        args = x, plan, tensor_type(node).dtype, self.device
        self.body.values[node] = self.body.call(node, node.name, exchange_between_stages, args)

    # -- one transfer --------------------------------------------------------------------------------------------------

    def _start_one(self, node: fx.Node) -> None:
        body, (operand,) = self.body, operands(node)
        collective = exchange_of(self.program, node, self.groups)
        x = body.calls(node, f"{node.name}_operand", body.values[operand], collective.before)
        start = collective.start
        if start is start_all_reduce and (collective.before or (body.is_last_of(operand) and body.hunt is None)):
            start = start_all_reduce_in_place
        if node.target is transfers.redistribute:
            collective = replace(collective, finish_args=(x, *collective.finish_args))
        body.open_gate()
        self.started[node] = body.call(node, f"{node.name}_start", start, (x, *collective.start_args)), collective
        body.fresh.add(node)

    def _group(self, arguments: Mapping[str, Any]) -> tuple[Ranks, str]:
        return group_of(self.program, arguments, self.groups)

    # -- a bucket ------------------------------------------------------------------------------------------------------

    def _start_bucket(self, members: Sequence[fx.Node]) -> None:
        body, first = self.body, members[0]
        before = self._reduction(first).before
        pieces = [body.calls(node, f"{node.name}_operand", body.operand(node), before) for node in members]
        body.open_gate()
        start, args = self._starting(members)
        self.buckets[first] = body.call(first, f"{first.name}_bucket", start, (pieces, *args))

    def _finish_bucket(self, members: Sequence[fx.Node]) -> None:
        body, first = self.body, members[0]
        finish, args = self._finishing(members)
        pieces = body.call(first, f"{first.name}_pieces", finish, (self.buckets.pop(first), *args))
        for k, node in enumerate(members):
            body.receive(node, operator.getitem, (pieces, k), self._reduction(node).after)
            body.fresh.add(node)

    def _starting(self, members: Sequence[fx.Node]) -> Call:
        first = members[0]
        ranks, group = self._group(_arguments(first))
        if first.target is transfers.all_gather:
            return start_gather_bucket, (len(ranks), group)
        op = self._reduction(first).op
        if first.target is transfers.all_reduce:
            return start_bucket, (op, group)
        return start_scatter_bucket, (_places(members), len(ranks), op, group)

    def _finishing(self, members: Sequence[fx.Node]) -> Call:
        first = members[0]
        if first.target is transfers.all_reduce:
            return finish_bucket, ([tuple(tensor_type(node).shape) for node in members],)
        if first.target is transfers.all_gather:
            return finish_gather_bucket, (_places(members),)
        ranks, _ = self._group(_arguments(first))
        return finish_scatter_bucket, (_places(members), ranks.index(self.program.rank))

    def _reduction(self, node: fx.Node) -> Reduction:
        """Return how the bucket of a transfer is reduced; a gather reduces nothing."""
        if node.target is transfers.all_gather:
            return Reduction("")
        arguments = _arguments(node)
        return Reduction.of(arguments.get("op", "sum"), tensor_type(node).dtype, len(self._group(arguments)[0]))


def exchange_of(program: Program, node: fx.Node, groups: Mapping[Ranks, str]) -> Exchange:
    """Return the collective of a transfer of a rank's local program.

    Args:
        groups: ranks, in ascending order → the name of their process group.

    Raises:
        SimulationError: the ranks of the group are not in ascending order.
    """
    arguments, source = _arguments(node), tensor_type(operands(node)[0])
    ranks, group = group_of(program, arguments, groups)
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


def group_of(program: Program, arguments: Mapping[str, Any], groups: Mapping[Ranks, str]) -> tuple[Ranks, str]:
    """Return the ranks of a collective, in the order of its axes, and the name of their process group, whose order is
    ascending."""
    ranks = program.meshes[arguments.get("stage")].group(program.rank, arguments["axis"])
    return ranks, groups[tuple(sorted(ranks))]


def _arguments(node: fx.Node) -> dict[str, Any]:
    return transfers.arguments(node.target, node.args, node.kwargs)


def _places(members: Sequence[fx.Node]) -> tuple[Place, ...]:
    return tuple(
        (
            flat_view(arguments := _arguments(node), tensor_type(operands(node)[0]).shape),
            arguments["dim"],
            tuple(tensor_type(node).shape),
        )
        for node in members
    )
