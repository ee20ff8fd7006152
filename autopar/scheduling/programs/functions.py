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
    """

    phases: tuple[str, ...]
    nodes: tuple[fx.Node, ...]
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    replaced: Mapping[fx.Node, fx.Node] = field(default_factory=dict)

    @staticmethod
    def of(nodes: Sequence[fx.Node], gives: Sequence[fx.Node], phases: Collection[str] = ()) -> Function:
        gives = tuple(dict.fromkeys(gives))
        constants = [node for node in nodes if node.op == "get_attr"]
        named = tuple(phases or dict.fromkeys(record_of(node).phase for node in nodes))
        return Function(named, tuple(nodes), (*constants, *_read_from_outside(nodes, gives)), gives)


def functions_of(program: Program, whole: bool) -> list[Function]:
    """Return the functions of a program. Linear in the graph.

    Args:
        whole: whether the program is one function. Else each phase is one, and also returns the values that later
            phases read. Gradients are results of the backward, also where the forward computes them.
    """
    if whole:
        return [Function.of([node for node in program.nodes if runs(node)], operands(program.output))]
    nodes: dict[str, list[fx.Node]] = {}
    for node in program.nodes:
        if runs(node):
            nodes.setdefault(record_of(node).phase, []).append(node)
    first = min(nodes, key=PHASES.index, default="forward")
    if first != "reduction":  # the forward of a call returns also where it computes nothing
        first = "forward"
    nodes = {phase: nodes.get(phase, []) for phase in PHASES if phase in nodes or phase == first}
    gives: dict[str, list[fx.Node]] = {phase: [] for phase in nodes}
    for node, result in zip(operands(program.output), record_of(program.output).results, strict=True):
        phase = record_of(node).phase if node.op == "call_function" else first
        if result.kind == "grad" and PHASES.index(phase) < PHASES.index("backward"):
            phase = "backward"
        gives.setdefault(phase, []).append(node)
    for phase, part in nodes.items():
        for node in _read_from_outside(part, gives[phase]):
            made = record_of(node).phase
            if node.op == "call_function" and made != phase:
                gives[made].append(node)
    return [Function.of(part, gives[phase], (phase,)) for phase, part in nodes.items()]


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
