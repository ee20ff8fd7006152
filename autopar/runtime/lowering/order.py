"""Decide the order of a function's lines: when each collective starts, with which others, and when it is waited for.

    program                                                  order
    y : f32[16 256] = all_gather(h, 1, tp, sizes=…)          start y
    z : f32[64 256] = t(w)                                   compute z
    u : f32[16 64] = mm(y, z)                                finish y
                                                             compute u

A collective starts at the line of its transfer, or when its bucket is full (``buckets``), and its first reader waits
for it. The order is data: whatever lowers it decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.runtime.lowering.buckets import Buckets
from autopar.runtime.lowering.donated import Donated, overwritten, updated_together


class LineKind(Enum):
    """What a line of the order does with its values."""

    COMPUTE = "compute"
    START = "start"  # a collective, of one transfer or of a bucket of several
    FINISH = "finish"  # wait for the collective of the same values
    ADD = "add"  # to a sum in donated memory
    OVERWRITE = "overwrite"  # the value is that of an operand, which an update overwrites
    UPDATE = "update"  # several parameters in place, by one op


class Line(NamedTuple):
    """One line of the order; ``nodes`` has one node, or the members of a bucket, or the updates of one op."""

    kind: LineKind
    nodes: tuple[fx.Node, ...]

    def __str__(self) -> str:
        return f"{self.kind.value} {' '.join(node.name for node in self.nodes)}"


def order_of(
    nodes: Sequence[fx.Node], results: Sequence[fx.Node], given: Collection[fx.Node], buckets: Buckets, donated: Donated
) -> list[Line]:
    """Order the lines of a function. Linear in the graph.

    Args:
        nodes: the ops and transfers of the function, in program order.
        results: what the function returns; collectives that nobody reads earlier are waited for in the end.
        given: what the function takes.
        buckets: which transfers share a collective.
        donated: what is computed in place.
    """
    return _Order(given, buckets, donated).run(nodes, results)


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts something that its first reader waits for. Messages between stages wait themselves."""
    row = transfers.BY_FUNCTION.get(node.target)
    if row is None or not row.collective or row.function in (transfers.send, transfers.recv):
        return False
    return bool(transfers.arguments(row.function, node.args, node.kwargs)["axis"])


class _Order:
    """Walks over the nodes of a function, and appends lines in front of each for what it reads."""

    def __init__(self, given: Collection[fx.Node], buckets: Buckets, donated: Donated) -> None:
        self.lines: list[Line] = []
        self.buckets, self.donated, self.updates = buckets, donated, donated.updates
        self.computed = set(given)
        self.started: dict[fx.Node, tuple[fx.Node, ...]] = {}  # what nothing has waited for yet → its bucket
        self.unfinished_sums: list[fx.Node] = []  # sums whose addends are still being reduced

    def run(self, nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[Line]:
        elsewhere = self.buckets.members.union(self.buckets.late.values())
        for bucket in self.buckets.begin(0):
            self.bucket(bucket)
        first_update = next((node for node in nodes if record_of(node).phase == "update"), None)
        for node in nodes:
            if node is first_update:
                self.settle()
            if node in self.buckets.runs:
                self.bucket(self.buckets.runs[node])
            elif node.op == "call_function" and node not in elsewhere and node not in self.computed:
                self.node(node)
                self.start_due(node)
        self.settle()
        for node in results:
            self.read(node)
        return self.lines

    def append(self, kind: LineKind, *nodes: fx.Node) -> None:
        self.lines.append(Line(kind, nodes))

    def read(self, node: fx.Node) -> None:
        """Wait for the collective of a value. The gathers of the next block start before."""
        if node in self.buckets.stage:
            for bucket in self.buckets.begin(self.buckets.stage[node] + 1):
                self.bucket(bucket)
        if node in self.started:
            members = self.started[node]
            for member in members:
                del self.started[member]
            self.append(LineKind.FINISH, *members)

    def node(self, node: fx.Node) -> None:
        """Append the line of a node, and before it what its operands wait for."""
        if is_collective(node):
            self.start([node])
            return
        if node in self.donated.sums:
            self.add(node)
            return
        self.computed.add(node)
        if node in self.updates or (is_getitem(node) and node.args[0] in self.updates):
            self.read(overwritten(node))
            self.append(LineKind.OVERWRITE, node)
            if node in self.donated.buckets:
                self.update(self.donated.buckets[node])
        else:
            for operand in operands(node):
                self.read(operand)
            self.append(LineKind.COMPUTE, node)

    def add(self, sum: fx.Node) -> None:
        self.computed.add(sum)
        self.read(operands(sum)[1])
        self.append(LineKind.ADD, sum)

    def update(self, updates: Sequence[fx.Node]) -> None:
        columns, _ = updated_together(updates)
        for value in (*itertools.chain(*columns), *operands(updates[0])):
            self.read(value)
        self.append(LineKind.UPDATE, *updates)

    def start(self, members: Sequence[fx.Node]) -> None:
        for node in members:
            self.read(operands(node)[0])
        self.started |= dict.fromkeys(members, tuple(members))
        self.append(LineKind.START, *members)

    def bucket(self, members: Sequence[fx.Node]) -> None:
        """Start a bucket, and add the one before it to the sums."""
        for operand in (operands(node)[0] for node in members if node in self.buckets.stage):
            if operand not in self.computed:  # the cast of a parameter, earlier than in the program
                self.node(operand)
        if len(members) == 1:
            self.node(members[0])
        elif members:
            self.start(members)
        if sums := [self.buckets.late[node] for node in members if node in self.buckets.late]:
            self.add_up()
            self.unfinished_sums = sums

    def start_due(self, node: fx.Node) -> None:
        """Start the buckets that this value fills."""
        for reduced in self.buckets.due.get(node, ()):
            self.bucket(self.buckets.add(reduced))

    def add_up(self) -> None:
        """Add the latest bucket of gradients to their sums."""
        sums, self.unfinished_sums = self.unfinished_sums, []
        for sum in sums:
            self.add(sum)
            self.start_due(sum)

    def settle(self) -> None:
        """Start the buckets that are not full, and finish the sums."""
        while (left := self.buckets.rest()) or self.unfinished_sums:
            for bucket in left:
                self.bucket(bucket)
            self.add_up()
