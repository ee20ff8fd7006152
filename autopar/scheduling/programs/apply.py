"""Write a schedule into the local program of a rank, which becomes a *scheduled* program.

    local                                            scheduled
    y : f32[16 256] = all_gather(h, 1, tp, …)   →    y_start : f32[16 256] = start all_gather(h, 1, tp, …) on tp
    z : f32[64 256] = t(w)                           z : f32[64 256] = t(w)
    u : f32[16 64] = mm(y, z)                        y : f32[16 256] = wait(y_start)
                                                     u : f32[16 64] = mm(y, z)

The lines of a schedule name values of the explicit program, so that one schedule fits the programs of all ranks. A
value that a rank does not have is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import make_node, map_operands, operands, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.record import Record
from autopar.scheduling.lines import Line
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.functions import MESSAGES


def scheduled(local: Program, order: Sequence[FunctionLines]) -> Program:
    """Return a local program in the order of the lines of its functions. Linear in the graph.

    Args:
        local: the program of one rank, which does not change.
        order: all ops and transfers of the explicit program that it was made from.
    """
    return _Writer(local).run(order)


class _Writer:
    """Copies a local program, line by line.

    Attributes:
        values: node of the local program → its node in the scheduled one.
        started: collective → the node that starts it.
        messages: how many messages of several members a stream has.
    """

    def __init__(self, local: Program) -> None:
        self.local, self.graph = local, fx.Graph()
        self.nodes = {node.name: node for node in local.nodes}
        self.names = set(self.nodes)
        self.values: dict[fx.Node, fx.Node] = {}
        self.started: dict[fx.Node, fx.Node] = {}
        self.messages: dict[str, int] = {}
        self.phase = "forward"

    def run(self, order: Sequence[FunctionLines]) -> Program:
        local = self.local
        for node in local.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.copy(node)
        for function in order:
            for line, phase in zip(function.lines, self.phases(function), strict=True):
                self.phase = phase
                self.line(line)
        self.copy(local.output)
        streams = tuple(dict.fromkeys(stream for node in self.started if (stream := stream_name(node))))
        return Program(self.graph, "scheduled", local.mesh, stages=local.stages, streams=streams,
                       coordinates=local.coordinates, tree=local.tree, constants=local.constants)  # fmt: skip

    def line(self, line: Line) -> None:
        members = [self.nodes[part.op] for part in line.parts if part.op in self.nodes]
        if line.kind == "start":
            self.start(members)
            return
        for node in members:
            if line.kind == "wait":
                self.wait(node)
            else:
                self.compute(node)

    def phases(self, function: FunctionLines) -> list[str]:
        """Return the phase of each line. Where a function has several, a start and a wait belong to the phase in which
        they stand: that of the op before them."""
        phases, phase = [], function.phases[0] if function.phases else self.phase
        for line in function.lines:
            node = self.nodes.get(line.parts[0].op)
            if line.kind == "compute" and node is not None:
                phase = record_of(node).phase
            phases.append(phase)
        return phases

    def compute(self, node: fx.Node) -> None:
        """Write an op; before it, what only local programs have: the seeds of a rank's pieces."""
        if node in self.values:
            return
        for operand in operands(node):
            if operand not in self.values:
                self.compute(operand)
        self.copy(node)

    def copy(self, node: fx.Node) -> None:
        self.add(node, node.name, node.op, node.target, record_of(node))

    def start(self, members: Sequence[fx.Node]) -> None:
        communicating = [node for node in members if communicates(node)]
        if not communicating:
            for node in members:
                self.compute(node)
            return
        message = self.message(stream_name(communicating[0])) if len(communicating) > 1 else ""
        for node in members:
            if node in communicating:
                record = record_of(node)._replace(
                    phase=self.phase, stream=stream_name(node), started=True, message=message
                )
                self.started[node] = self.add(node, f"{node.name}_start", node.op, node.target, record)
            else:  # on this rank it exchanges nothing
                self.compute(node)

    def wait(self, node: fx.Node) -> None:
        if node in self.started:  # else it exchanges nothing on this rank
            new = make_node(self.graph, node.name, "call_function", transfers.wait, (self.started[node],), {})
            set_record(new, record_of(node)._replace(phase=self.phase))
            self.values[node] = new

    def add(self, node: fx.Node, name: str, op: str, target: object, record: Record) -> fx.Node:
        name = self.unused(name) if name != node.name else name
        new = make_node(self.graph, name, op, target, map_operands(node.args, self.values.__getitem__),
                        map_operands(dict(node.kwargs), self.values.__getitem__))  # fmt: skip
        set_record(new, record)
        self.values.setdefault(node, new)
        return new

    def unused(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def message(self, stream: str) -> str:
        """Return a name for a message of several members."""
        number = self.messages[stream] = self.messages.get(stream, -1) + 1
        return f"{stream}_{number}"


def stream_name(node: fx.Node) -> str:
    """Return the name of the stream of a collective: its axes."""
    return "_".join(transfers.axes_of(transfers.arguments(node.target, node.args, node.kwargs)["axis"]))


def communicates(node: fx.Node) -> bool:
    """Return whether a node of a local program is a collective in which the rank exchanges data."""
    row = transfers.BY_FUNCTION.get(node.target)
    if row is None or not row.collective or row.function in MESSAGES:
        return False
    return bool(transfers.arguments(node.target, node.args, node.kwargs)["axis"])
