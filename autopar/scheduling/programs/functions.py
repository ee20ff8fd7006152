"""Split a program into the functions that run, one for each phase of a call or one for a whole program, and ops."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.costs.op_prices import VIEWS
from autopar.ir import transfers
from autopar.ir.layout import span
from autopar.ir.nodes import is_getitem, node_at, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import PHASES, TensorType
from autopar.optimizers import IN_PLACE
from autopar.rules.binding import bind_node
from autopar.scheduling.op import COMPUTE, Op
from autopar.scheduling.programs.donated import MemoryReaders, written_over

# -- shared ------------------------------------------------------------------------------------------------------------
#
# Decide which collectives may share a message and be cut into chunks, and compute the bytes of largest pieces.


SHARED = (transfers.all_reduce, transfers.reduce_scatter, transfers.all_gather)


def sends_nothing(function: Any, type: Any) -> bool:
    """Return whether an op is a collective of a value without elements, which each rank makes by itself."""
    row = transfers.BY_FUNCTION.get(function) if isinstance(type, TensorType) and 0 in type.shape else None
    return row is not None and row.collective


def may_share(node: fx.Node) -> bool:
    """Return whether a node of an explicit program is a collective that may share a message and be cut.

    A reduction may if the backend reduces in its own dtype. A gather or a reduce-scatter may if all pieces have one
    size.
    """
    if node.target not in SHARED or sends_nothing(node.target, tensor_type(node)):
        return False
    kind = transfers.arguments(node.target, node.args, node.kwargs).get("op", "sum")
    dtype = tensor_type(node).dtype
    is_plain = kind != "avg" and not transfers.is_gathered(kind, dtype) and dtype not in transfers.REDUCED_AS
    return is_plain and _is_even(node)


def _is_even(node: fx.Node) -> bool:
    """Return whether the pieces of a gather or a reduce-scatter have one size on all ranks."""
    if node.target is transfers.all_reduce:
        return True
    arguments, source = transfers.arguments(node.target, node.args, node.kwargs), tensor_type(operands(node)[0])
    parts = arguments.get("parts")
    split = transfers.split_parts(source.attr, source.shape, source.mesh, parts, arguments["axis"])
    splits = [axes for dim in split for axes in dim]
    sizes = [size for dim in parts for size in dim] if parts else source.shape
    dim = arguments["dim"]
    axes = (*splits[dim], arguments["axis"]) if node.target is transfers.reduce_scatter else splits[dim]
    return sizes[dim] % source.mesh.count(axes) == 0


def piece_bytes(type: TensorType) -> int:
    """Return the bytes of a value's largest piece."""
    if type.layout is None:
        return math.prod(type.shape) * type.dtype.itemsize
    mesh = type.layout.mesh
    first = dict.fromkeys(mesh.sizes, 0)
    parts = type.attr.parts(type.shape)
    return math.prod(span(size, axes, mesh, first)[1] for size, axes in parts) * type.dtype.itemsize


# -- ops ---------------------------------------------------------------------------------------------------------------
#
# Make the ops of a schedule from an explicit program: one for each of its ops and transfers.
#
#     gathered : f32[8 4] = all_gather(w, 0, tp) →   Op("gathered", "tp", 2.1e-05, (), bytes=64, kind=("all_gather", …))
#     y : f32[16 4] = mm(x, gathered)            →   Op("y", "compute", 5.3e-06, ("gathered",), memory=256)
#
# Seconds, bytes and memory are those of the largest piece, so that all ranks decide the same. A collective is on the
# stream of its axes, ``"tp"`` or ``"dp tp"``. An op that overwrites a state, such as an update, comes after all earlier
# readers of its memory, through views too.


def program_ops(
    program: Program, function: Function, seconds: Mapping[str, float], overwriting: Collection[fx.Node] = ()
) -> list[Op]:
    """Return the ops of a function of an explicit program, in the order of the program. Linear in the graph.

    Args:
        seconds: value → the seconds of the op that computes it.
        overwriting: the ops that write the next value of a state into its memory.
    """
    reads = Reads(program, overwriting)
    inside = {node.name for node in function.nodes}
    return [
        _op(node, seconds.get(node.name, 0.0), [name for name in reads.of(node) if name in inside],
            [name for name in reads.overwrites.get(node, ()) if name in inside])
        for node in function.nodes
        if node.op == "call_function" and not is_getitem(node)
    ]  # fmt: skip


def _op(node: fx.Node, seconds: float, after: list[str], behind: list[str]) -> Op:
    if not is_collective(node):
        return Op(node.name, COMPUTE, seconds, after, memory=0 if is_view(node) else _held(node), behind=behind)
    axes = transfers.axes_along(node.target, tensor_type(operands(node)[0]), arguments_of(node), tensor_type(node))
    stream = " ".join(axes or tensor_type(node).mesh.names)  # parts of a dim may be split anew along the same axes
    type = tensor_type(node)
    kind = transfers.BY_FUNCTION[node.target].name, arguments_of(node).get("op", "sum"), type.dtype, type.mesh.name
    size = piece_bytes(tensor_type(operands(node)[0])) if may_share(node) else 0
    return Op(node.name, stream, seconds, after, size, kind, 0 if is_view(node) else _held(node), behind)


def arguments_of(node: fx.Node) -> dict[str, object]:
    return transfers.arguments(node.target, node.args, node.kwargs)


def is_view(node: fx.Node) -> bool:
    """Return whether the result of an op is in the memory of its first operand: a view, a piece of dim 0, or an
    all-reduce whose operand has no other reader, so that it is reduced in place."""
    if node.target is transfers.all_reduce:
        return _is_last_of(operands(node)[0])
    if node.target is transfers.slice:
        return arguments_of(node)["dim"] == 0 and not arguments_of(node).get("parts")
    return node.target not in transfers.BY_FUNCTION and bind_node(node).rule.op in VIEWS


def _is_last_of(value: fx.Node) -> bool:
    """Return whether a value has its own memory and one reader."""
    if value.op != "call_function" or is_getitem(value) or len(value.users) > 1:
        return False
    return not is_view(value) or _is_last_of(operands(value)[0])


def _held(node: fx.Node) -> int:
    """Return the bytes of the largest pieces of an op's results."""
    types = record_of(node).type
    return sum(piece_bytes(type) for type in (types if isinstance(types, tuple) else (types,)) if type is not None)


class Reads:
    """Finds the ops that a node reads, and in ``overwrites`` the earlier readers of the memory that it overwrites."""

    def __init__(self, program: Program, overwriting: Collection[fx.Node]) -> None:
        self.base: dict[fx.Node, tuple[str, ...]] = {}  # value → its op, and those whose memory it is a view of
        self.overwrites = _overwrites(program, overwriting)

    def of(self, node: fx.Node) -> list[str]:
        """Return the names of the ops that a node reads."""
        found: dict[str, None] = {}
        for value in operands(node):
            found |= dict.fromkeys(self.bases(value))
        found.pop(node.name, None)
        return list(found)

    def bases(self, value: fx.Node) -> tuple[str, ...]:
        """Return the names of the op that computes a value, and of those whose memory the value is a view of."""
        if is_getitem(value):
            source = value.args[0]
            assert isinstance(source, fx.Node)
            return self.bases(source)
        if value.op != "call_function":
            return ()
        if value not in self.base:
            self.base[value] = (
                value.name,
                *(self.bases(operands(value)[0]) if operands(value) and is_view(value) else ()),
            )
        return self.base[value]


def _overwrites(program: Program, overwriting: Collection[fx.Node]) -> dict[fx.Node, list[str]]:
    """Map each op that overwrites memory to the earlier readers of that memory: an op that writes the next value of a
    state, and an update in place."""
    placeholders = {node.name: node for node in program.placeholders}
    place = {node: k for k, node in enumerate(program.nodes)}
    readers = MemoryReaders(program)
    found: dict[fx.Node, dict[str, None]] = {}

    def overwrite(op: fx.Node, value: fx.Node) -> None:
        earlier = [reader.name for reader in readers.of(value) if place[reader] < place[op]]
        found.setdefault(op, {}).update(dict.fromkeys(earlier))

    for value, result in zip(operands(program.output), record_of(program.output).results, strict=True):
        while is_getitem(value):
            value = node_at(value)
        if result.kind == "state" and value in overwriting:
            overwrite(value, placeholders[result.of])
    for node in program.nodes:
        for value in written_over(node) if node.target in IN_PLACE else ():
            overwrite(node, value)
    return {op: list(names) for op, names in found.items()}


# -- functions ---------------------------------------------------------------------------------------------------------


MESSAGES = (transfers.send, transfers.recv)


@dataclass(frozen=True)
class Function:
    """The part of a program that runs as one function.

    Attributes:
        phases: the phases that it runs, in order.
        nodes: its ops, transfers and constants, in the order of the program.
        takes: the values that it reads and does not compute; its constants first.
        gives: the values that it returns.
        replaced: next value of a state that another part of the program computes → the state, which it reads instead.
        stage: the stage of a pipeline whose ops it has; empty where a program has none.
    """

    phases: tuple[str, ...]
    nodes: tuple[fx.Node, ...]
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    replaced: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    stage: str = ""

    @staticmethod
    def of(nodes: Sequence[fx.Node], gives: Sequence[fx.Node], phases: Collection[str] = (), stage: str = ""
           ) -> Function:  # fmt: skip
        gives = tuple(dict.fromkeys(gives))
        constants = [node for node in nodes if node.op == "get_attr"]
        named = tuple(phases or dict.fromkeys(record_of(node).phase for node in nodes))
        return Function(named, tuple(nodes), (*constants, *_read_from_outside(nodes, gives)), gives, stage=stage)


def functions_of(program: Program, whole: bool, stages: Mapping[str, str] | None = None) -> list[Function]:
    """Return the functions of a program. Linear in the graph.

    Args:
        whole: whether the program is one function. Else each phase is one, and also returns the values that later
            phases read. Gradients are results of the backward, also where the forward computes them.
        stages: node → its stage (``stages_in``); each stage has functions of its own. Messages between stages are in
            none: a function takes what its stage receives, and gives what it sends.
    """
    if whole:
        return [Function.of([node for node in program.nodes if runs(node)], operands(program.output))]
    stages = {} if stages is None else stages
    nodes: dict[str, dict[str, list[fx.Node]]] = {}  # stage → phase → its nodes
    places: dict[tuple[str, str], int] = {}  # stage and phase → where its first op or message stands
    messages = []
    for k, node in enumerate(program.nodes):
        is_message = bool(stages) and node.target in MESSAGES
        if is_message:
            messages.append(node)
        if (is_message and node.target is transfers.recv) or (not is_message and runs(node)):
            stage, phase = stages.get(node.name, ""), record_of(node).phase
            part = nodes.setdefault(stage, {}).setdefault(phase, [])
            if not is_message:  # else the function takes it, also if it computes nothing
                part.append(node)
            places.setdefault((stage, phase), k)
    for stage in dict.fromkeys((*stages.values(), *(() if stages else ("",)))):
        phases = nodes.setdefault(stage, {})
        # the forward of a call returns also where it computes nothing
        nodes[stage] = {phase: phases.get(phase, []) for phase in PHASES if phase in phases or phase == "forward"}
    gives: dict[tuple[str, str], list[fx.Node]] = {}

    def give(node: fx.Node, phase: str) -> None:
        """Let a function give a value: that which computes it, or that of a phase if it is computed elsewhere."""
        stage = stages.get(node.name, "")
        made = node.op == "call_function" and node not in sent
        gives.setdefault((stage, record_of(node).phase if made else phase), []).append(node)

    sent = {*messages}
    for node, result in zip(operands(program.output), record_of(program.output).results, strict=True):
        first = next(iter(nodes[stages.get(node.name, "")]), "forward")
        phase = record_of(node).phase if node.op == "call_function" else first
        if result.kind == "grad" and PHASES.index(phase) < PHASES.index("backward"):
            phase = "backward"
        gives.setdefault((stages.get(node.name, ""), phase), []).append(node)
    for message in messages:
        for value in operands(message):
            if value.target is not transfers.send:
                give(value, record_of(message).phase)
    for stage, phases in nodes.items():
        for phase, part in phases.items():
            for node in _read_from_outside(part, gives.get((stage, phase), [])):
                if node.op == "call_function" and node not in sent and record_of(node).phase != phase:
                    gives.setdefault((stage, record_of(node).phase), []).append(node)
    order = [
        (stage, phase)
        for phase in PHASES
        for stage in sorted(nodes, key=lambda stage: places.get((stage, phase), -1))
        if phase in nodes[stage]
    ]
    return [Function.of(nodes[stage][phase], gives.get((stage, phase), []), (phase,), stage) for stage, phase in order]


def stages_in(explicit: Program, local: Program | None = None) -> dict[str, str]:
    """Return the stage of each node of a program with stages: by name, in the order of the stages.

    Args:
        local: a program that was made of the explicit one, whose nodes are meant. What it has besides, such as the
            starts of collectives, is on the stage of its operands.
    """
    known = {}
    for node in explicit.nodes:
        types = record_of(node).type
        mesh = next((type.mesh for type in (types if isinstance(types, tuple) else (types,))
                     if type is not None and type.layout is not None), None)  # fmt: skip
        if mesh is not None and mesh.name is not None:
            known[node.name] = mesh.name
    if local is None:
        return known
    found: dict[str, str] = {}
    for node in local.nodes:
        inherited = next((found[value.name] for value in operands(node) if value.name in found), None)
        stage = known.get(node.name, inherited)
        if stage is not None:
            found[node.name] = stage
    return found


def is_collective(node: fx.Node) -> bool:
    """Return whether a node of an explicit program is a collective: it is started, and its first reader waits for it.

    A send or recv waits in its own line. A redistribute in which no rank receives anything is no collective, and
    neither is a transfer of a value without elements.
    """
    row = transfers.BY_FUNCTION.get(node.target)
    if row is None or not row.collective or row.function in MESSAGES:
        return False
    if sends_nothing(node.target, tensor_type(node)):
        return False
    if row.function is not transfers.redistribute:
        return True
    return transfers.received(row.function, tensor_type(operands(node)[0]), {}, tensor_type(node)) > 0


def runs(node: fx.Node) -> bool:
    """Return whether a node is an op, a transfer or a constant, and not an input or the output."""
    return node.op in ("call_function", "get_attr")


def _read_from_outside(nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the values that a function reads and does not compute."""
    computed = set(nodes)
    read = dict.fromkeys(value for node in nodes for value in operands(node))
    return [value for value in {**read, **dict.fromkeys(results)} if value not in computed]
