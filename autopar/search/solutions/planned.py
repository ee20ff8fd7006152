"""Write the layouts of a program's values as text, by names that another capture of the program has too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import fx

from autopar.capture.decompose.expanded import expansion_of, refs
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType, ValueType
from autopar.ir.text.printer import print_dims, print_pending
from autopar.search.problem.strategies import StepLayouts
from autopar.search.solutions.value_names import value_names
from autopar.search.solutions.written import operand_types, type_of


@dataclass(frozen=True)
class Planned:
    """The layouts of one op or placeholder, as programs print them: ``[256/tp 64] +dp``.

    Attributes:
        gives: of each result; ``None`` for a result that the op does not make.
        needs: of each operand, as the op reads it.
        inside: of each op of its expansion, if the op is expanded, which has no ``needs`` then.
    """

    gives: tuple[str | None, ...]
    needs: tuple[str, ...] = ()
    inside: tuple[Planned, ...] = ()


def planned_values(
    program: Program,
    types: Mapping[fx.Node, ValueType],
    uses: Mapping[fx.Node, Sequence[Requirement | None]],
    inside: Mapping[fx.Node, Sequence[StepLayouts]],
) -> dict[str, Planned]:
    """Return name → layouts of all values that have some, and of what the program returns."""
    planned = {}
    for node, name in value_names(program).items():
        type = types.get(node)
        parts = () if type is None else type if isinstance(type, tuple) else (type,)
        gives = tuple(None if part is None else layout_text(part.shape, part.attr) for part in parts)
        if node in inside:
            planned[name] = Planned(gives, inside=_inside(node, inside[node]))
            continue
        values = [record_of(operand).type for operand in operands(node)]
        needs = tuple(
            layout_text(value.shape, need.placed.attr)
            for value, need in zip(values, uses.get(node, ()), strict=False)
            if need is not None and isinstance(value, TensorType)
        )
        planned[name] = Planned(gives, needs)
    return planned


def _inside(node: fx.Node, layouts: Sequence[StepLayouts]) -> tuple[Planned, ...]:
    """Return the layouts of the ops of an expansion."""
    expansion, read = expansion_of(node), operand_types(node)
    found = []
    for step, (needs, gives) in zip(expansion.steps, layouts, strict=True):
        parts = step.type if isinstance(step.type, tuple) else (step.type,)
        made = zip(parts, gives, strict=True)
        reads = zip(refs(step), needs, strict=True)
        found.append(
            Planned(
                tuple(None if part is None or give is None else layout_text(part.shape, give) for part, give in made),
                tuple(layout_text(type_of(ref, expansion, read).shape, need) for ref, need in reads),
            )
        )
    return tuple(found)


@lru_cache(maxsize=4096)
def layout_text(shape: tuple[int, ...], attr: DistAttr) -> str:
    """Return a layout as programs print it, with the sizes of the call in the place of symbols."""
    shape = tuple(map(int, shape))
    plain = tuple(tuple((None if n is None else int(n), axes) for n, axes in dim) for dim in attr.dims)
    attr = replace(attr, dims=plain)
    return f"[{print_dims(shape, attr)}]{print_pending(attr)}"
