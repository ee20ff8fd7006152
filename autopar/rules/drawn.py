"""Find the ops that must be split alike, because they draw the same random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from autopar.ir.layout import Dim, normal_dim
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import element_of, is_getitem, operands, record_of
from autopar.ir.ops.seeded_random import is_seeded_random
from autopar.rules.binding import bind_node
from autopar.rules.strategies import Bound, axes_of

Splits = tuple[tuple[str, Dim], ...]


def drawn_alike(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return op → an earlier op like which it must be split.

    That is, for a random op, the first one of its stream, of which it is a recomputed copy; and for the backward of a
    kernel that draws its dropout itself, that kernel, whose own state it reads.
    """
    first: dict[tuple[object, ...], fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if is_seeded_random(node.target):
            types = record_of(node).type
            shapes = tuple([t and t.shape for t in types]) if isinstance(types, tuple) else types and types.shape
            of_stream = first.setdefault((node.kwargs["seed"], node.kwargs["stream"], node.target, shapes), node)
            if of_stream is not node:
                found[node] = of_stream
        elif first and node.op == "call_function" and not is_getitem(node):
            made_by = (own_maker(value) for value in operands(node))
            kernel = next((op for op in made_by if op is not None and is_seeded_random(op.target)), None)
            if kernel is not None:
                found[node] = kernel
    return found


def own_maker(value: fx.Node) -> fx.Node | None:
    """Return the op that leaves this value on each rank as its own (``own`` in a rule); ``None`` if it is data."""
    if not is_getitem(value):
        return None
    op, index = element_of(value)
    return op if index in bind_node(op).own[1] else None


def splits_in_common(bound: Bound, split: Mapping[str, Dim], other: Bound, mesh: Mesh) -> Splits:
    """Return the splits of the factors that two ops have in common, in normal form."""
    normal = {f: normal_dim(dim, bound.sizes[f], mesh) for f, dim in split.items() if f in other.sizes}
    return tuple(sorted((f, dim) for f, dim in normal.items() if axes_of(dim)))


def split_of(node: fx.Node) -> dict[str, Dim]:
    """Return the split of each factor of an op of a placed program."""
    record = record_of(node)
    types = record.type if isinstance(record.type, tuple) else (record.type,)
    needs = [need.placed.attr for need in record.uses if need is not None]
    mesh = next(t.mesh for t in types if t is not None)
    return bind_node(node).splits(needs, [None if t is None else t.attr for t in types], mesh)
