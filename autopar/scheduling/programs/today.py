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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.blocks import block_of, is_parameter, reader_of
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.scheduling.lines import Line, LineKind, Part
from autopar.scheduling.programs.donated import Donated, overwritten, updated_together
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.functions import SHARED, Function, is_collective, may_share, piece_bytes

# -- buckets -----------------------------------------------------------------------------------------------------------
#
# Bucket the reductions and gathers of the policy ``today``, so that several tensors share one collective.
#
# A collective of a small tensor costs nearly as much as one of a large tensor. So several tensors are sent as one flat
# tensor:
#
# * gradients, in the order in which they are computed: a full bucket is reduced while the backward goes on. The sizes
#   are those of DistributedDataParallel (Li et al., PyTorch Distributed, VLDB 2020): a small first bucket, which starts
#   early, then large ones. If each micro-batch scatters its gradients, as with ZeRO 2, a bucket is added to the sums of
#   gradients one bucket later;
# * parameters that are gathered where they are used, as with ZeRO 3: those of a block are gathered while the block
#   before is computed (Zhao et al., PyTorch FSDP, VLDB 2023);
# * the parameters that an update gathers at its end;
# * small values that are reduced side by side, such as the sum and the count of a loss.


FIRST, OTHERS = 2**20, 25 * 2**20  # bytes
SMALL = 2**16  # bytes; the most bytes of a bucket of small reductions that are next to each other

Key = tuple[Any, Any, str, torch.dtype, str | None]  # transfer, axis or axes, op, dtype, stage


def largest_pieces(explicit: Program) -> dict[str, int]:
    """Map each reduction and gather to the bytes of its operand's largest piece.

    Buckets count these bytes, so that they are the same on every rank.
    """
    return {node.name: piece_bytes(tensor_type(operands(node)[0])) for node in explicit.nodes if node.target in SHARED}


Stage = dict[Key, list[fx.Node]]  # buckets that start together


@dataclass
class Buckets:
    """The reductions and gathers of a phase that share collectives.

    Attributes:
        bytes: each reduction and gather → the bytes that it adds to a bucket.
        due: value → its reductions, which are added to a bucket as soon as the value is computed.
        late: a reduction that is only added to a sum in donated memory, so that it can wait → that sum.
        runs: the first of several reductions or gathers side by side → all of them.
        ahead: gathers of parameters, grouped by block, in the order in which the blocks are computed.
        stage: a gather of a parameter → its index in ``ahead``.
    """

    bytes: Mapping[str, int]
    due: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    late: dict[fx.Node, fx.Node] = field(default_factory=dict)
    runs: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    ahead: list[Stage] = field(default_factory=list)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    _begun: int = 0
    _open: dict[Key, list[fx.Node]] = field(default_factory=dict)
    _filled: dict[Key, int] = field(default_factory=dict)
    _limit: dict[Key, int] = field(default_factory=dict)

    @staticmethod
    def of(
        program: Program, nodes: Sequence[fx.Node], bytes: Mapping[str, int], sums: Collection[fx.Node] = ()
    ) -> Buckets:
        """Assign the nodes of a function of an explicit program to buckets.

        Args:
            bytes: name of a reduction or gather → the bytes that it adds to a bucket (``largest_pieces``).
            sums: additions to donated memory.
        """
        buckets, computed, output = Buckets(bytes), set(nodes), program.output
        runs: list[list[fx.Node]] = [[]]
        ahead = _Ahead(program, bytes)
        for node in nodes:
            operand = operands(node)[0] if node.name in bytes and _may_share(node) else None
            if operand is None:
                runs.append([])
            elif node.target is transfers.all_gather and record_of(node).phase != "update":
                ahead.add(node)
            elif operand in computed and len(node.users) == 1 and next(iter(node.users)) in sums:
                buckets.late[node] = next(iter(node.users))
                buckets.due.setdefault(operand, []).append(node)
            elif operand in sums or (
                node.target is transfers.all_reduce
                and operand in computed
                and operand.target not in SHARED  # what reads another collective stays where it is
                and set(node.users) == {output}
            ):
                buckets.due.setdefault(operand, []).append(node)
            else:
                limit = OTHERS if node.target is transfers.all_gather else SMALL
                if bytes[node.name] > limit or (runs[-1] and (_key(node) != _key(runs[-1][0]) or operand in runs[-1])):
                    runs.append([])
                _put(runs, node, bytes, limit)
        buckets.runs = {run[0]: run for run in runs if len(run) > 1}
        buckets.ahead = ahead.stages
        buckets.stage = {
            node: k for k, stage in enumerate(ahead.stages) for members in stage.values() for node in members
        }
        return buckets

    def begin(self, stage: int) -> list[list[fx.Node]]:
        """Return the buckets of gathers up to a stage that have not started, and count them as started."""
        buckets = [members for group in self.ahead[self._begun : stage + 1] for members in group.values()]
        self._begun = max(self._begun, stage + 1)
        return buckets

    @property
    def members(self) -> set[fx.Node]:
        """All reductions and gathers that share a bucket."""
        return {node for members in (*self.due.values(), *self.runs.values(), self.stage) for node in members}

    def add(self, node: fx.Node) -> list[fx.Node]:
        """Add a reduction to its bucket. Return the members of the bucket if it is full now, else nothing."""
        key = _key(node)
        self._open.setdefault(key, []).append(node)
        self._filled[key] = self._filled.get(key, 0) + self.bytes[node.name]
        if self._filled[key] < self._limit.get(key, FIRST):
            return []
        self._limit[key], self._filled[key] = OTHERS, 0
        return self._open.pop(key)

    def rest(self) -> list[list[fx.Node]]:
        """Return the buckets that are not full, and empty them."""
        left = list(self._open.values())
        self._open.clear()
        return left


class _Ahead:
    """Groups gathers of parameters, in program order: those of one block together, or of several small blocks."""

    def __init__(self, program: Program, bytes: Mapping[str, int]) -> None:
        self.bytes, self.block = bytes, block_of(program)
        self.stages: list[Stage] = []
        self._filled = 0
        self._current: tuple[str, str] | None = None  # phase, block

    def add(self, node: fx.Node) -> None:
        current = record_of(node).phase, self.block(reader_of(node))
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        gathered = self.bytes[node.name] * tensor_type(node).mesh.count(transfers.axes_of(arguments["axis"]))
        same_phase = self._current is not None and self._current[0] == current[0]
        if not same_phase or self._filled + gathered > OTHERS or (self._current != current and self._filled >= FIRST):
            self.stages.append({})
            self._filled = 0
        self._current = current
        self._filled += gathered
        self.stages[-1].setdefault(_key(node), []).append(node)


def _may_share(node: fx.Node) -> bool:
    """Return whether a transfer may share a bucket: gathers of activations wait where they are."""
    is_activation = node.target is transfers.all_gather and not is_parameter(operands(node)[0])
    return may_share(node) and not (is_activation and record_of(node).phase != "update")


def _put(buckets: list[list[fx.Node]], node: fx.Node, bytes: Mapping[str, int], limit: int) -> None:
    """Add a node to the last bucket, or to a new one if that is full."""
    if not buckets or (buckets[-1] and sum(bytes[member.name] for member in buckets[-1]) + bytes[node.name] > limit):
        buckets.append([])
    buckets[-1].append(node)


def _key(node: fx.Node) -> Key:
    arguments, type = transfers.arguments(node.target, node.args, node.kwargs), record_of(node).type
    assert isinstance(type, TensorType)
    return node.target, arguments["axis"], arguments.get("op", "sum"), type.dtype, type.mesh.name


# -- today -------------------------------------------------------------------------------------------------------------


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
