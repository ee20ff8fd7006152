"""Split a program into the functions that run: one for each phase of a call, or one for a whole program of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import PHASES
from autopar.scheduling.programs.shared import sends_nothing

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
    messages = []
    for node in program.nodes:
        if stages and node.target in MESSAGES:
            messages.append(node)
        elif runs(node):
            nodes.setdefault(stages.get(node.name, ""), {}).setdefault(record_of(node).phase, []).append(node)
    for stage in dict.fromkeys((*stages.values(), *(() if stages else ("",)))):
        phases = nodes.setdefault(stage, {})
        # the forward of a call returns also where it computes nothing
        first = "reduction" if min(phases, key=PHASES.index, default="") == "reduction" else "forward"
        nodes[stage] = {phase: phases.get(phase, []) for phase in PHASES if phase in phases or phase == first}
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
    place = {node: k for k, node in enumerate(program.nodes)}
    order = [
        (stage, phase)
        for phase in PHASES
        for stage in sorted(nodes, key=lambda stage: place[nodes[stage][phase][0]] if nodes[stage].get(phase) else -1)
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
