"""Write a schedule into the local program of a rank, which becomes a *scheduled* program.

    local                                            scheduled
    y : f32[16 256] = all_gather(h, 1, tp, …)   →    y_start : f32[16 256] = start all_gather(h, 1, tp, …) on tp
    z : f32[64 256] = t(w)                           z : f32[64 256] = t(w)
    u : f32[16 64] = mm(y, z)                        y : f32[16 256] = wait(y_start)
                                                     u : f32[16 64] = mm(y, z)

A collective that is cut is started chunk by chunk, and its chunks are joined:

    w_dp : f32[32 4] = all_reduce(w, dp)        →    w_dp_0_start : f32[100] = start all_reduce(w, dp) on dp from 0 to 100
                                                     w_dp_1_start : f32[28] = start all_reduce(w, dp) on dp from 100 to 128
                                                     w_dp_0 : f32[100] = wait(w_dp_0_start)
                                                     w_dp_1 : f32[28] = wait(w_dp_1_start)
                                                     w_dp : f32[32 4] = join_chunks([w_dp_0, w_dp_1], shape=(32, 4))

A collective that crosses the end of a run is started before the run ends, and the next run waits for it. The started
collective is a state, whose next value is the start:

    w_grad : f32[8] = state(w_grad_sum)         →    w_dp_start : f32[8] = state(w_dp_next_start) on dp
    finish:                                          finish:
    w_dp : f32[8] = all_reduce(w_grad, dp)             w_dp : f32[8] = wait(w_dp_start)
    …                                                …
      w_grad_sum : f32[8] = add.Tensor(a, b)           w_grad_sum : f32[8] = add.Tensor(a, b)
                                                       w_dp_next_start : f32[8] = start all_reduce(w_grad_sum, dp) on dp

A late collective is started ``on late``, which is a process group of its own over the same ranks.

The lines of a schedule name values of the explicit program, so that one schedule fits the programs of all ranks. A
rank skips the values that it does not have. ``chunks`` cuts each rank's pieces.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import make_node, map_operands, node_at, operands, record_of, set_record, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import PHASES, Record, Result, TensorType
from autopar.ir.value_names import next_values
from autopar.scheduling.lines import Line, Part
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.functions import MESSAGES

# -- chunks ------------------------------------------------------------------------------------------------------------
#
# Cut collectives into chunks: which elements of a rank's piece each chunk sends, and the type of a chunk.
#
# A schedule cuts by bytes of the largest piece. Each rank cuts its own piece in the same proportions, which are equal
# within a group.


Span = tuple[int, int]  # the first element, and the one behind the last


def cuts_of(functions: Iterable[FunctionLines], nodes: Mapping[str, fx.Node]) -> dict[fx.Node, dict[Part, Span]]:
    """Return for each collective that is sent in several parts: part → the elements of this rank's piece.

    A part without elements is left out.

    Args:
        functions: the lines of the schedule.
        nodes: name → node of the rank's program.
    """
    parts: dict[str, list[Part]] = {}
    for function in functions:
        for line in function.lines:
            if line.kind == "start":
                for part in line.parts:
                    parts.setdefault(part.op, []).append(part)
    return {nodes[name]: _cut(nodes[name], own) for name, own in parts.items() if len(own) > 1 and name in nodes}


def _cut(node: fx.Node, parts: list[Part]) -> dict[Part, Span]:
    """Return part of a collective → the elements that it sends; at least one part is left."""
    total, elements = max(part.end for part in parts), _elements_sent(node)
    spans = {part: (part.begin * elements // total, part.end * elements // total) for part in parts}
    return {part: span for part, span in spans.items() if span[0] < span[1]} or {parts[0]: (0, 0)}


def _elements_sent(node: fx.Node) -> int:
    """Return the elements that a chunk of a collective is cut from: of its operand, or of each row of a scatter."""
    kept = tensor_type(node) if node.target is transfers.reduce_scatter else tensor_type(operands(node)[0])
    return math.prod(kept.shape)


def chunk_type(node: fx.Node, span: Span) -> TensorType:
    """Return the type of a chunk of a collective: its elements in a row, of a gather a row for each rank."""
    type = tensor_type(node)
    rows = () if node.target is not transfers.all_gather else (len(node.kwargs["sizes"]),)  # type: ignore[arg-type]
    return TensorType((*rows, span[1] - span[0]), type.dtype)


# -- apply -------------------------------------------------------------------------------------------------------------


def scheduled(local: Program, order: Sequence[FunctionLines], across: Collection[str] = ()) -> Program:
    """Return a local program in the order of the lines of its functions. Linear in the graph.

    Args:
        local: the program of one rank, which does not change.
        order: the lines of each function, with all ops and transfers of the explicit program.
        across: the collectives that are started in the run before.
    """
    return _Writer(local, order, across).run()


LATE = "late"  # the stream of late collectives


class _Writer:
    """Copies a local program, line by line.

    Attributes:
        values: node of the local program → its node in the scheduled one.
        cuts: collective that is cut → the parts in which it is sent.
        started: part of a collective → the node that starts it.
        chunks: collective that is cut → its chunks that were waited for.
        messages: stream → the number of its messages with several members, so far.
        late: the collectives that run on the stream ``late``.
        across: collective that was started in the run before → the state that is its operand.
        under_way: start that crosses the end of the run → the state that it replaces.
        nexts: state → its next value.
    """

    def __init__(self, local: Program, order: Sequence[FunctionLines], across: Collection[str]) -> None:
        self.local, self.order, self.graph = local, order, fx.Graph()
        self.nodes = {node.name: node for node in local.nodes}
        self.names = set(self.nodes)
        self.values: dict[fx.Node, fx.Node] = {}
        self.cuts = cuts_of(order, self.nodes)
        self.started: dict[tuple[fx.Node, Part], fx.Node] = {}
        self.chunks: dict[fx.Node, list[fx.Node]] = {}
        self.messages: dict[str, int] = {}
        self.phase = "forward"
        self.late = frozenset[str]().union(*(function.late for function in order))
        self.across = {self.nodes[name]: operands(self.nodes[name])[0] for name in across if name in self.nodes}
        self.under_way: dict[fx.Node, fx.Node] = {}
        self.nexts = next_values(local)

    def run(self) -> Program:
        local = self.local
        replaced = {home for home in self.across.values() if set(home.users) <= self.across.keys()}
        for node in local.nodes:
            if node.op in ("placeholder", "get_attr") and node not in replaced:
                self.copy(node)
        self.take_under_way()
        for function in self.order:
            for line, phase in zip(function.lines, self.phases(function), strict=True):
                self.phase = phase
                self.line(line)
        self.results(replaced)
        streams = tuple(dict.fromkeys(self.stream_of(node) for node, _ in self.started))
        return Program(self.graph, "scheduled", local.mesh, stages=local.stages, streams=streams,
                       coordinates=local.coordinates, tree=local.tree, constants=local.constants)  # fmt: skip

    def take_under_way(self) -> None:
        """Write the states that the run before has started, in the order in which they are started."""
        messages = 0
        for function in self.order:
            for line in function.lines:
                members = [row for row in self.present(line) if row[0] in self.across] if line.kind == "start" else []
                message = f"{self.stream_of(members[0][0])}_before_{messages}" if len(members) > 1 else ""
                messages += bool(message)
                for node, part in members:
                    self.started[node, part] = self.under_way_before(node, part, message)

    def under_way_before(self, node: fx.Node, part: Part, message: str) -> fx.Node:
        """Write the state of a part of a collective that was started in the run before."""
        span = self.span(node, part)
        type = record_of(node).type if span is None else chunk_type(node, span)
        name = self.unused(self.start_name(node, part))
        record = Record(type, role="state", stream=self.stream_of(node), started=True, message=message, span=span)
        home = make_node(self.graph, name, "placeholder", name, (), {})
        set_record(home, record)
        return home

    def results(self, replaced: Collection[fx.Node]) -> None:
        """Write the results. The state of a collective that crosses replaces the state of its operand."""
        output = self.local.output
        gone = {home.name for home in replaced}
        rows = [
            (self.values[value], result)
            for value, result in zip(operands(output), record_of(output).results, strict=True)
            if result.of not in gone
        ]
        rows += [(start, Result("state", home.name)) for start, home in self.under_way.items()]
        places = {node.name: k for k, node in enumerate(self.graph.nodes)}
        rows.sort(key=lambda row: places[row[1].of] if row[1].kind == "state" else -1)
        new = make_node(self.graph, "output", "output", "output", (tuple(value for value, _ in rows),), {})
        set_record(new, record_of(output)._replace(results=tuple(result for _, result in rows), uses=()))

    def present(self, line: Line) -> list[tuple[fx.Node, Part]]:
        """Return the parts of a line that this rank has."""
        found = [(self.nodes[part.op], part) for part in line.parts if part.op in self.nodes]
        return [(node, part) for node, part in found if part in self.cuts.get(node, (part,))]

    def line(self, line: Line) -> None:
        present = self.present(line)
        members = [(node, part) for node, part in present if line.kind != "compute" and communicates(node)]
        for node, part in present:
            if line.kind == "wait" and (node, part) in self.started:
                self.wait(node, part)
        for node in dict.fromkeys(node for node, _ in present if line.kind == "wait"):
            if len(self.chunks.get(node, ())) == len(self.cuts.get(node, ())) > 1:
                self.join(node, self.chunks.pop(node))
        for node, part in present:
            if line.kind != "wait" and (node, part) not in members:  # it computes, or exchanges nothing on this rank
                self.compute(node)
        if line.kind == "start" and members:
            message = self.message(self.stream_of(members[0][0])) if len(members) > 1 else ""
            for node, part in members:
                if node in self.across:
                    self.start_for_the_next(node, part, message)
                else:
                    self.start(node, part, message)

    def phases(self, function: FunctionLines) -> list[str]:
        """Return the phase in which each line stands: that of the latest computation up to it."""
        phases, phase = [], function.phases[0] if function.phases else self.phase
        for line in function.lines:
            node = self.nodes.get(line.parts[0].op)
            if line.kind == "compute" and node is not None:
                phase = record_of(node).phase
            phases.append(phase)
        return phases

    def compute(self, node: fx.Node) -> None:
        """Write an op, and before it the operands that only local programs have, such as seeds of random numbers."""
        if node in self.values:
            return
        for operand in operands(node):
            if operand not in self.values:
                self.compute(operand)
        self.copy(node)

    def copy(self, node: fx.Node) -> None:
        self.add(node, node.name, node.op, node.target, record_of(node))

    def start(self, node: fx.Node, part: Part, message: str) -> None:
        span = self.span(node, part)
        type = record_of(node).type if span is None else chunk_type(node, span)
        name = self.start_name(node, part)
        phase = self.phase_of(node, [self.values[value] for value in operands(node)])
        record = record_of(node)._replace(
            type=type, phase=phase, stream=self.stream_of(node), started=True, message=message, span=span
        )
        self.started[node, part] = self.add(node, self.unused(name), node.op, node.target, record)

    def start_name(self, node: fx.Node, part: Part) -> str:
        chunk = "" if self.span(node, part) is None else f"_{self.number(node, part)}"
        return f"{node.name}{chunk}_start"

    def start_for_the_next(self, node: fx.Node, part: Part, message: str) -> None:
        """Write the start of a collective that the next run waits for."""
        home, state = self.started[node, part], self.across[node]
        before = self.values.get(state)
        self.values[state] = self.values[self.nexts[state.name]]
        phase = self.phase_of(node, [self.values[state]])
        record = record_of(node)._replace(
            type=record_of(home).type, phase=phase, stream=self.stream_of(node), started=True, message=message,
            span=record_of(home).span,
        )  # fmt: skip
        name = self.unused(f"{home.name.removesuffix('_start')}_next_start")
        self.under_way[self.add(node, name, node.op, node.target, record)] = home
        if before is not None:
            self.values[state] = before

    def wait(self, node: fx.Node, part: Part) -> None:
        started = self.started[node, part]
        span = self.span(node, part)
        name = node.name if span is None else self.unused(f"{node.name}_{self.number(node, part)}")
        new = make_node(self.graph, name, "call_function", transfers.wait, (started,), {})
        set_record(new, record_of(node)._replace(type=record_of(started).type, phase=self.phase_of(node, [started])))
        if span is None:
            self.values[node] = new
            return
        self.chunks.setdefault(node, []).append(new)

    def join(self, node: fx.Node, chunks: list[fx.Node]) -> None:
        """Write the join of the chunks of a collective, in the order of their elements."""
        arguments, shape = transfers.arguments(node.target, node.args, node.kwargs), tensor_type(node).shape
        about: dict[str, Any] = {"shape": shape}
        if node.target is transfers.all_gather:
            about |= {name: arguments[name] for name in ("dim", "parts") if arguments.get(name) is not None}
        ordered = sorted(chunks, key=lambda chunk: record_of(node_at(chunk)).span or (0, 0))
        new = make_node(self.graph, node.name, "call_function", transfers.join_chunks, (ordered,), about)
        set_record(new, record_of(node)._replace(phase=self.phase_of(node, ordered)))
        self.values[node] = new

    def add(self, node: fx.Node, name: str, op: str, target: object, record: Record) -> fx.Node:
        new = make_node(self.graph, name, op, target, map_operands(node.args, self.values.__getitem__),
                        map_operands(dict(node.kwargs), self.values.__getitem__))  # fmt: skip
        set_record(new, record)
        if not record.started:
            self.values[node] = new
        return new

    def phase_of(self, node: fx.Node, read: Sequence[fx.Node]) -> str:
        """Return the phase of a line of a collective: the phase in which the line stands, limited by two others.

        It is not before the phases of its operands, and not after that of its transfer, whose readers may be in the
        same phase. Only transfers of ``finish`` are in ``finish``.
        """
        if record_of(node).phase != "finish" and self.phase == "finish":
            return self.phase_of_lines(node, read, "forward")
        return self.phase_of_lines(node, read, self.phase)

    def phase_of_lines(self, node: fx.Node, read: Sequence[fx.Node], phase: str) -> str:
        made = [record_of(value).phase for value in read if value.op != "placeholder"]
        earliest = max(map(PHASES.index, made), default=0)
        place = min(PHASES.index(phase), PHASES.index(record_of(node).phase))
        return PHASES[max(earliest, place)]

    def span(self, node: fx.Node, part: Part) -> Span | None:
        """Return the elements that a part of a collective sends; ``None`` if they are all."""
        cut = self.cuts.get(node)
        return None if cut is None or len(cut) == 1 else cut[part]

    def number(self, node: fx.Node, part: Part) -> int:
        return list(self.cuts[node]).index(part)

    def unused(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def stream_of(self, node: fx.Node) -> str:
        return LATE if node.name in self.late else stream_name(node)

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
