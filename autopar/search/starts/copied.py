"""Read the layouts of a program from a placed copy of it, in which some ops are expanded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autopar.capture.decompose.expanded import expansion_of, refs
from autopar.ir.nodes import element_of, is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, ValueType
from autopar.search.problem.strategies import StepLayouts

Types = dict[fx.Node, ValueType]
Uses = dict[fx.Node, tuple[Requirement | None, ...]]
Inside = dict[fx.Node, tuple[StepLayouts, ...]]


@dataclass(frozen=True)
class Copied:
    """A placed copy of a program.

    Attributes:
        program: the copy.
        nodes: node → its copy, of those that are in the copy.
        steps: op that is expanded in the copy → the ops of its expansion.
    """

    program: Program
    nodes: Mapping[fx.Node, fx.Node]
    steps: Mapping[fx.Node, Sequence[fx.Node]]


class Read(NamedTuple):
    """The layouts of a placed copy, by the nodes of the program.

    Attributes:
        types, uses, inside: as of a plan that was found.
        alike: whether all ops of an expansion read each operand in one layout.
    """

    types: Types
    uses: Uses
    inside: Inside
    alike: bool


def layouts_of(program: Program, placed: Copied) -> Read:
    """Return the layouts of a program's placed copy."""
    types: Types = {}
    uses: Uses = {}
    inside: Inside = {}
    alike = True
    for node in program.nodes:
        if node in placed.steps:
            types[node], uses[node], inside[node], same = _expanded(node, placed.steps[node])
            alike &= same
        elif is_getitem(node) and node.args[0] in placed.steps:
            parts = types[node.args[0]]  # type: ignore[index]
            assert isinstance(parts, tuple)
            types[node], uses[node] = parts[element_of(node)[1]], (None,)
        else:
            record = record_of(placed.nodes[node])
            types[node] = record.type
            if node.op in ("call_function", "output"):
                uses[node] = record.uses
    return Read(types, uses, inside, alike)


def _expanded(
    node: fx.Node, steps: Sequence[fx.Node]
) -> tuple[ValueType, tuple[Requirement | None, ...], tuple[StepLayouts, ...], bool]:
    """Return the layouts of an expanded op from those of the ops of its expansion."""
    expansion, reads = expansion_of(node), dict[int, list[Requirement | None]]()
    layouts = []
    for step, copy in zip(expansion.steps, steps, strict=True):
        record = record_of(copy)
        for ref, need in zip(refs(step), record.uses, strict=True):
            if ref.step < 0:
                reads.setdefault(-ref.step - 1, []).append(need)
        parts = record.type if isinstance(record.type, tuple) else (record.type,)
        needs = tuple(need.placed.attr for need in record.uses if need is not None)
        layouts.append(StepLayouts(needs, tuple(None if part is None else part.attr for part in parts)))
    made = []
    for result in expansion.results:
        type = None if result is None else record_of(steps[result.step]).type
        several = result is not None and result.part is not None and isinstance(type, tuple)
        made.append(type[result.part] if several else type)  # type: ignore[index, union-attr]
    uses = tuple(reads.get(k, [None])[0] for k in range(len(operands(node))))
    same = all(len(set(needs)) == 1 for needs in reads.values())
    tuples = isinstance(record_of(node).type, tuple)
    return (tuple(made) if tuples else made[0]), uses, tuple(layouts), same  # type: ignore[arg-type]
