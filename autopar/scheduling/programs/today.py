"""Order a program as DistributedDataParallel and FSDP do: the policy ``today``.

    program                                                  lines
    y : f32[16 256] = all_gather(h, 1, tp)                   start y
    z : f32[64 256] = t(w)                                   compute z
    u : f32[16 64] = mm(y, z)                                wait y
                                                             compute u

Ops compute in the order of the program. A collective starts at its place in the program, or when its bucket is full
(``buckets``), and its first reader waits for it. Updates with equal numbers stand side by side, so that they run as one
op.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from torch import fx

from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.scheduling.lines import Line, LineKind, Part
from autopar.scheduling.programs.buckets import Buckets, largest_pieces
from autopar.scheduling.programs.donated import Donated, overwritten, updated_together
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.functions import Function, is_collective


def today(program: Program, functions: Sequence[Function], donated: Donated) -> tuple[FunctionLines, ...]:
    """Return the lines of an explicit program, function by function. Linear in the graph.

    Args:
        functions: the functions of the program.
        donated: the updates and sums that are computed in place.
    """
    bytes = largest_pieces(program)
    ordered = []
    for function in functions:
        buckets = Buckets.of(program, function.nodes, bytes, donated.sums)
        lines = _Order(function.takes, buckets, donated).run(function.nodes, function.gives)
        ordered.append(FunctionLines(function.phases, tuple(lines)))
    return tuple(ordered)


class _Order:
    """Walks over the nodes of a function, and appends for each the waits for its operands and its own line."""

    def __init__(self, given: Collection[fx.Node], buckets: Buckets, donated: Donated) -> None:
        self.lines: list[Line] = []
        self.buckets, self.donated, self.updates = buckets, donated, donated.updates
        self.computed = set(given)
        self.started: dict[fx.Node, tuple[fx.Node, ...]] = {}  # collective that is not waited for yet → its bucket
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
        self.lines.append(Line(kind, tuple(Part(node.name, 0, self.buckets.bytes.get(node.name, 0)) for node in nodes)))

    def read(self, node: fx.Node) -> None:
        """Wait for the collective of a value. The gathers of the next block start before the wait."""
        if node in self.buckets.stage:
            for bucket in self.buckets.begin(self.buckets.stage[node] + 1):
                self.bucket(bucket)
        if node in self.started:
            members = self.started[node]
            for member in members:
                del self.started[member]
            self.append("wait", *members)

    def node(self, node: fx.Node) -> None:
        """Append the line of a node, and before it the waits for its operands."""
        if is_collective(node):
            self.start([node])
            return
        if node in self.donated.sums:
            self.add(node)
            return
        self.computed.add(node)
        if node in self.updates or (is_getitem(node) and node.args[0] in self.updates):
            self.read(overwritten(node))
            if node in self.donated.buckets:
                self.update(self.donated.buckets[node])
        else:
            for operand in operands(node):
                self.read(operand)
            self.append("compute", node)

    def add(self, sum: fx.Node) -> None:
        self.computed.add(sum)
        self.read(operands(sum)[1])
        self.append("compute", sum)

    def update(self, updates: Sequence[fx.Node]) -> None:
        """Append updates that run as one op, and after them their results."""
        columns, _ = updated_together(updates)
        for value in (*itertools.chain(*columns), *operands(updates[0])):
            self.read(value)
        for update in updates:
            self.append("compute", update)
        for update in updates:
            for result in update.users:
                if is_getitem(result):
                    self.append("compute", result)

    def start(self, members: Sequence[fx.Node]) -> None:
        for node in members:
            self.read(operands(node)[0])
        self.started |= dict.fromkeys(members, tuple(members))
        self.append("start", *members)

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
