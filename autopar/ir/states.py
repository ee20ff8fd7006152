"""Find the next values of the states of a program, and the states whose collectives the run before has started."""

from __future__ import annotations

from torch import fx

from autopar.ir.nodes import name_of, operands, record_of
from autopar.ir.program import Program


def next_values(program: Program) -> dict[str, fx.Node]:
    """Return the next value of each state of a program, by placeholder."""
    rows = zip(operands(program.output), record_of(program.output).results, strict=True)
    return {result.of: value for value, result in rows if result.kind == "state"}


def next_values_by_name(program: Program) -> dict[str, fx.Node]:
    """Return the next value of each state of a program, by the user's names."""
    names = {node.name: name_of(node) for node in program.placeholders}
    return {names[state]: value for state, value in next_values(program).items()}


def started_states(program: Program) -> dict[fx.Node, fx.Node]:
    """Map each state that the run before has started to its next value: the start of the same collective."""
    homes = {node.name: node for node in program.placeholders if record_of(node).started}
    nexts = next_values(program) if homes else {}
    return {homes[name]: value for name, value in nexts.items() if name in homes}
