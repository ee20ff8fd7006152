"""Put an op's expansion in its place in a program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.capture.decompose.expansions import EXPANSIONS
from autopar.capture.decompose.subgraph import Ref, Subgraph, SubgraphOp, subgraph
from autopar.ir.commit import Value
from autopar.ir.edit import Edit
from autopar.ir.nodes import element_of, map_operands, operands, record_of
from autopar.ir.record import Requirement, ValueType
from autopar.rules.binding import typed
from autopar.torch_private import aten

ARANGE = aten.arange.default
CPU = torch.device("cpu")


class Insertion(NamedTuple):
    """What is inserted for one step of an expansion: the type of its result, and what it requires of its operands."""

    type: ValueType
    uses: Sequence[Requirement | None] = ()


def expansion_of(node: fx.Node, device: torch.device = CPU) -> Subgraph:
    """Return the expansion of an op's call, with operands in the dtypes that the op requires.

    Args:
        device: of tensors that the expansion creates.
    """
    required = iter(record_of(node).uses or [None] * len(operands(node)))  # dtypes of mixed precision
    args, kwargs = (
        map_operands(values, lambda operand: _required(typed(operand), next(required)))
        for values in (node.args, dict(node.kwargs))
    )
    args, kwargs = [typed(a) for a in args], {key: typed(value) for key, value in kwargs.items()}
    return subgraph(EXPANSIONS[node.target].function, args, kwargs, device)


def expand(
    edit: Edit,
    node: fx.Node,
    expansion: Subgraph,
    new: dict[fx.Node, Value],
    places: dict[tuple[Any, ...], Value],
    insertion: Callable[[int, SubgraphOp], Insertion],
) -> list[Value]:
    """Put an expansion in the place of its op, and return the results of its steps.

    Args:
        new: old value → its replacement.
        places: what numbers the indices of a dim, by its size, type and phase; ops of one phase share it.
        insertion: returns what is inserted for a step.
    """
    inputs = [new.get(operand, operand) for operand in operands(node)]
    results: list[Value] = []
    types: list[ValueType] = []

    def value(ref: Ref) -> Value:
        if ref.step < 0:
            return inputs[-ref.step - 1]
        if ref.part is None:
            return results[ref.step]
        parts = types[ref.step]
        assert isinstance(parts, tuple)
        part = parts[ref.part]
        uses = (None,) if part is not None and part.layout is not None else ()  # every use has one once it is placed
        return edit.insert(
            operator.getitem, (results[ref.step], ref.part), before=node, type=part, about=node, uses=uses
        )

    for k, step in enumerate(expansion.steps):
        type, uses = insertion(k, step)
        types.append(type)
        numbered = (repr((step.args, dict(step.kwargs))), type, record_of(node).phase)
        if step.target is ARANGE and numbered in places:
            results.append(places[numbered])
            continue
        results.append(edit.insert(step.target, _filled(step.args, value), _filled(dict(step.kwargs), value),
                                   before=node, type=type, about=node, uses=uses if any(uses) else ()))  # fmt: skip
        if step.target is ARANGE:
            places[numbered] = results[-1]
    parts = (
        {0: node}
        if len(expansion.results) == 1 and not isinstance(record_of(node).type, tuple)
        else {element_of(user)[1]: user for user in node.users}
    )
    for part, old in parts.items():
        ref = expansion.results[part]
        assert ref is not None
        new[old] = value(ref)
        edit.replace_all_uses(old, new[old])
    for old in dict.fromkeys([*parts.values(), node]):
        edit.erase(old)
    return results


def refs(step: SubgraphOp) -> list[Ref]:
    """Return the values that a step reads, in the order of its operands."""
    found: list[Ref] = []
    _filled((step.args, dict(step.kwargs)), found.append)
    return found


def arguments(step: SubgraphOp, of: Callable[[Ref], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step, with something in the place of each value."""
    return _filled(step.args, of), _filled(dict(step.kwargs), of)


def _required(type: Any, need: Requirement | None) -> Any:
    return type if need is None else replace(type, dtype=need.dtype)


def _filled(value: Any, of: Callable[[Ref], object]) -> Any:
    """Return arguments with each reference replaced by its value."""
    if isinstance(value, Ref):
        return of(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(member, of) for member in value)
    if isinstance(value, dict):
        return {key: _filled(member, of) for key, member in value.items()}
    return value
