"""Find the states of a program whose collectives the run before has started."""

from __future__ import annotations

from torch import fx

from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program


def started_states(program: Program) -> dict[fx.Node, fx.Node]:
    """Map each state that the run before has started to its next value: the start of the same collective."""
    homes = {node.name: node for node in program.placeholders if record_of(node).started}
    rows = zip(operands(program.output), record_of(program.output).results, strict=True) if homes else ()
    return {homes[result.of]: value for value, result in rows if result.of in homes}
