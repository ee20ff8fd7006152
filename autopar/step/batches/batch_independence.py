"""Detect whether the forward mixes rows of the batch.

A batch that is cut into micro-batches is sharded over time. So the forward is placed on a mesh axis of two ranks that
shards the batch, and the layout of each value tells how it depends on the rows:

    x : f32[6 4] = input                x : f32[6/rows 4] = input             rows
    h : f32[6 8] = mm(x, w)       →     h : f32[6/rows 8] = mm(x, w)          rows; each depends on one row of x
    s : f32[] = sum(h)                  s : f32[] +rows = sum(h)              a sum over rows
    n : f32[8] = amax(h, [0])           n : f32[8] = amax(h as [6 8], [0])    mixes rows
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import ROWS, Mesh
from autopar.ir.nodes import behind, element_of, is_getitem, name_of, node_at, operands, record_of
from autopar.ir.ops.seeded_random import is_seeded_random, source_of
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.plan.choice import place_of
from autopar.plan.propagation import LayoutPropagation, PropagationOptions
from autopar.rules.binding import bind_node
from autopar.rules.registry import op_name
from autopar.step.compiling.graph_builder import GraphBuilder, type_of
from autopar.torch_private import aten

FILLED = {
    aten.full.default,
    aten.ones.default,
    aten.zeros.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}
DRAWN_JOINTLY = {"randperm", "multinomial"}  # an element depends on the others
OWN_STATISTICS = "batch_norm"  # it mixes the rows of a micro-batch, as in any loop that accumulates gradients


class BatchIndependence:
    """How the values of a traced forward depend on the rows of the batch.

    Args:
        values: the values in question.
        cut: the names of the inputs that are cut into micro-batches along dim 0.

    Attributes:
        count: the number of rows of a micro-batch, in the first of these inputs. With one row nothing can be detected.
        varying: the values that differ between micro-batches.
    """

    def __init__(self, program: Program, values: Sequence[fx.Node], cut: Collection[str], device: torch.device) -> None:
        inputs = {
            node: type_of(node).shape
            for node in program.placeholders
            if record_of(node).role == "input" and name_of(node) in cut
        }
        self.count = next((shape[0] for shape in inputs.values()), 1)
        self.varying: set[fx.Node] = set()
        for node in program.nodes:
            if (
                (node in inputs or record_of(node).role in ("seed", "state"))
                if node.op == "placeholder"
                else not self.varying.isdisjoint(operands(node))
            ):
                self.varying.add(node)
        self._same: dict[fx.Node, fx.Node] = {}
        self._placed: LayoutPropagation | None = None
        if self.count > 1:
            self._place(program, values, inputs, device)

    def _place(
        self, program: Program, values: Sequence[fx.Node], inputs: Mapping[fx.Node, Sequence[int]], device: torch.device
    ) -> None:
        builder, needed, same = GraphBuilder(device), behind(values), self._same
        for node in program.nodes:
            if node in needed:
                same[node] = (
                    builder.placeholder(node.name, _with_seed_of_rows(record_of(node)))
                    if node.op == "placeholder"
                    else builder.copy(node, same, program.constants)
                )
        split = {
            same[node].name: DistAttr.split(ROWS, *[None] * (len(shape) - 1))
            for node, shape in inputs.items()
            if node in same
        }
        self._placed = LayoutPropagation(
            builder.program([same[value] for value in values]), PropagationOptions(Mesh({ROWS: 2}), split)
        )
        self._placed.run()

    def has_rows(self, node: fx.Node) -> bool:
        """Return whether a value has a part for each row.

        Each part depends on its row alone, if nothing mixes rows before it.
        """
        type = self._type(node)
        return type is None or any(ROWS in axes for dim in type.attr.dims for _, axes in dim)

    def sums_rows(self, node: fx.Node) -> bool:
        """Return whether a value is a sum over rows."""
        type = self._type(node)
        return type is None or bool(type.attr.pending)

    def row_dims(self, node: fx.Node) -> list[tuple[int, int]]:
        """Return the dims of a value that have rows, each with the part of a merged dim that has them."""
        type = self._type(node)
        return (
            []
            if type is None
            else [(d, k) for d, dim in enumerate(type.attr.dims) for k, (_, axes) in enumerate(dim) if ROWS in axes]
        )

    def _type(self, node: fx.Node) -> TensorType | None:
        type = None if self._placed is None else self._placed.types[self._same[node]]
        return type if isinstance(type, TensorType) else None

    def mixing_nodes(self, values: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the nodes that mix rows, among those that these values are computed from, in order.

        Linear in their number.
        """
        placed = self._placed
        if placed is None:
            return []
        mixing = []
        for node in behind(values):
            new = self._same[node]
            if node.op != "call_function" or node not in self.varying or has_own_statistics(node):
                continue
            for value, need in zip(operands(new), placed.uses[new], strict=True):
                have = placed.types[value]
                if need is None or not isinstance(have, TensorType) or have.layout == need.layout:
                    continue
                place = place_of(ROWS, need.placed.attr)
                if have.attr.axes or place is None or not _repeats(value, place[0]):
                    mixing.append(node)
                    break
        return sorted(mixing)


def has_own_statistics(node: fx.Node) -> bool:
    """Return whether a node is a part of a batch norm, which mixes the rows of a micro-batch and counts them."""
    call = record_of(node).call
    return call is not None and OWN_STATISTICS in call.op


def _with_seed_of_rows(record: Record) -> Record:
    """Let each row draw its own random numbers, as with another seed.

    With ``random="single"`` a step draws the numbers of a single device in its order.
    """
    return record._replace(type=TensorType((), torch.int64)) if record.role == "seed" else record


def _repeats(node: fx.Node, dim: int) -> bool:
    """Return whether a value that is the same for all micro-batches repeats one entry along a dim.

    If so, a shorter batch only makes it shorter. Random numbers that each row draws independently count as repeated. A
    look-up repeats if its index or its table does.
    """
    known: dict[tuple[fx.Node, int], bool] = {}
    open_ = [(node, dim)]
    while open_:  # a value is decided after the values that it depends on
        value, d = item = open_[-1]
        needs = _repeats_where(value, d) if item not in known else []
        if unknown := [need for group in needs for need in group if need not in known]:
            open_ += unknown
            continue
        known.setdefault(item, all(any(known[need] for need in group) for group in needs))
        open_.pop()
    return known[node, dim]


def _repeats_where(value: fx.Node, dim: int) -> list[list[tuple[fx.Node, int]]]:
    """Return the operands and dims that must repeat for a value to repeat along a dim.

    At least one of each group must repeat. An empty group never does.
    """
    type = record_of(value).type
    if (
        value.target in FILLED
        or _is_drawn_independently(value)
        or (isinstance(type, TensorType) and type.shape[dim] == 1)
    ):
        return []
    if value.op != "call_function" or not isinstance(type, TensorType):
        return [[]]
    op, k = element_of(value) if is_getitem(value) else (value, 0)
    bound = bind_node(op)
    result_dims = bound.results[k]
    factors = set(result_dims[dim]) if result_dims else set[str]()
    operand_dims = [
        (k, e)
        for k, dims in enumerate(bound.operands)
        for e, dim_factors in enumerate(dims)
        if not factors.isdisjoint(dim_factors)
    ]
    if not factors.isdisjoint(bound.whole) or not (operand_dims or value.target is aten.expand.default):
        return [[]]
    return [_looked_up(op, operands(op)[k], e) for k, e in operand_dims]


def _is_drawn_independently(value: fx.Node) -> bool:
    """Return whether a value is random, and each element is drawn independently of the others."""
    if not is_seeded_random(value.target):
        return False
    name = op_name(source_of(value.target))
    return name not in DRAWN_JOINTLY or (name == "multinomial" and True in value.args)  # with replacement


def _looked_up(node: fx.Node, value: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """Return an operand and a dim of it; of an index, the dim that it looks into as well.

    Where that dim repeats, it does not matter which entries are taken.
    """
    if node.target is not aten.index.Tensor or value is node.args[0]:
        return [(value, dim)]
    indices: Any = node.args[1]
    return [(value, dim), (node_at(node), next(k for k, index in enumerate(indices) if index is value))]
