"""Select the parts of a rotated program that run: all of it, or some of its pieces.

A rotated program completes the run before, and has one micro-batch. A step of several micro-batches runs it in two
parts, with the inner micro-batches between them:

    part           finish   counts   micro-batch   end
    whole            x        x          x          x      one micro-batch, after another step
    begin                     x          x          x      one micro-batch, and no step before
    first            x        x          x                 the first of several, after another step
    first alone               x          x                 the first of several, and no step before
    last                                 x          x      the last of several
    finish           x                                     no step comes next

A part without the piece that computes the next value of a state reads the state itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from autopar.ir.nodes import behind, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Result
from autopar.ir.value_names import ValueRole, roles_in
from autopar.scheduling.programs.functions import Function

RunPart = Literal["whole", "begin", "first", "first alone", "last", "finish"]
Piece = Literal["finish", "counts", "micro-batch", "end"]

PIECES: Mapping[RunPart, frozenset[Piece]] = {
    "whole": frozenset({"finish", "counts", "micro-batch", "end"}),
    "begin": frozenset({"counts", "micro-batch", "end"}),
    "first": frozenset({"finish", "counts", "micro-batch"}),
    "first alone": frozenset({"counts", "micro-batch"}),
    "last": frozenset({"micro-batch", "end"}),
    "finish": frozenset({"finish"}),
}


@dataclass(frozen=True)
class Selected:
    """A part of a program.

    Attributes:
        nodes: its ops and transfers, and all constants.
        results: the results of the program that it computes.
        replaced: next value of a state that another part computes → the state.
        sums: placeholder of a sum of gradients or losses → the value that it hands to the next micro-batch.
    """

    nodes: frozenset[fx.Node]
    results: tuple[tuple[fx.Node, Result], ...]
    replaced: Mapping[fx.Node, fx.Node]
    sums: Mapping[fx.Node, fx.Node]


def roles_on_rank(program: Program, explicit: Program | None) -> dict[str, tuple[ValueRole, str]]:
    """Return the values of a step that a rank's program takes: name → role and parameter.

    Args:
        explicit: the program that it was made of. A stage may have a gradient of a parameter of another stage, and
            whether a name is that of a gradient is known where the parameter is.
    """
    return roles_in(program) | (roles_in(explicit) if explicit is not None and explicit.stages else {})


def handed_over(program: Program, explicit: Program | None = None) -> frozenset[str]:
    """Return the states of a scheduled program that one run hands to the next: started collectives, and values.

    ``explicit``: as of ``roles_on_rank``.
    """
    before = {name for name, (role, _) in roles_on_rank(program, explicit).items() if role is ValueRole.BEFORE}
    return frozenset(node.name for node in program.placeholders if record_of(node).started or name_of(node) in before)


def taken_by_finish(program: Program) -> frozenset[str]:
    """Return the user's names of the inputs that the phase ``finish`` reads, such as the learning rate of the step
    before."""
    return frozenset(
        name_of(node)
        for node in program.placeholders
        if record_of(node).role == "input" and any(record_of(user).phase == "finish" for user in node.users)
    )


def selected(
    program: Program, part: RunPart, sums: Mapping[str, str] | None = None, explicit: Program | None = None
) -> Selected:
    """Return a part of a scheduled program. Linear in the graph.

    Args:
        sums: placeholder of a sum → the value that it becomes.
        explicit: as of ``roles_on_rank``.
    """
    rows = list(zip(operands(program.output), record_of(program.output).results, strict=True))
    homes, pieces = {node.name: node for node in program.placeholders}, _pieces(program)
    runs = PIECES[part]
    nodes = frozenset(node for node in program.nodes if node.op == "get_attr" or pieces.get(node) in runs)
    unchanged = part != "finish"  # a value that no piece computes
    results = [row for row in rows if row[0] in nodes or (unchanged and row[0] not in pieces)]
    handed = frozenset[str]() if "end" in runs or part == "finish" else handed_over(program, explicit)
    named = {node.name: node for node in nodes}
    return Selected(
        nodes,
        tuple((value, result) for value, result in results if result.of not in handed),
        {
            value: homes[result.of]
            for value, result in rows
            if result.of in homes and value in pieces and value not in nodes
        },
        {homes[of]: named[value] for of, value in (sums or {}).items()} if part in ("first", "first alone") else {},
    )


def part_of(
    program: Program, part: RunPart, sums: Mapping[str, str] | None = None, explicit: Program | None = None, *,
    every_member: bool = False,
) -> Function:  # fmt: skip
    """Return a part of a program as a function; its arguments are those of ``selected``. Linear in the graph.

    A message that crosses the end of a run is passed as its first member alone, unless ``every_member`` is asked for.
    """
    chosen = selected(program, part, sums, explicit)
    nodes = [node for node in program.nodes if node in chosen.nodes]
    function = Function.of(nodes, [*(value for value, _ in chosen.results), *chosen.sums.values()])
    replaced = chosen.replaced
    takes = dict.fromkeys(replaced.get(value, value) for value in function.takes)
    passed = tuple if every_member else _first_members
    return replace(function, takes=passed(takes), gives=passed(function.gives), replaced=replaced)


def _pieces(program: Program) -> dict[fx.Node, Piece]:
    """Map each op and transfer to its piece."""
    rows = zip(operands(program.output), record_of(program.output).results, strict=True)
    roles, names = roles_in(program), {node.name: name_of(node) for node in program.placeholders}
    states = [(value, names[result.of]) for value, result in rows if result.kind == "state"]
    counts = behind([value for value, of in states if of in roles and roles[of][0] is ValueRole.COUNT])
    crossing = {value for value, _ in states if record_of(value).started}
    pieces: dict[fx.Node, Piece] = {}
    for node in reversed(list(program.nodes)):
        if node.op != "call_function":
            continue
        about = record_of(node)
        ends = about.started and all(pieces.get(user) == "end" for user in node.users)
        if about.phase == "update" or node in crossing or ends:
            pieces[node] = "end"
        elif about.phase == "finish":
            pieces[node] = "finish"
        else:
            pieces[node] = "counts" if node in counts else "micro-batch"
    return pieces


def _first_members(values: Collection[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the values, of each message only the first member."""
    known: set[str] = set()
    kept = []
    for value in values:
        message = record_of(value).message
        if message not in known:
            kept.append(value)
        known |= {message} - {""}
    return tuple(kept)
