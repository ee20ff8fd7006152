"""BatchIndependence: what the values of one micro-batch are of those of the whole batch.

A batch that is cut into micro-batches is split over an axis of time. So the forward is placed on an axis of two ranks that splits the batch,
and what values would be on it tells what they are:

    x : f32[6 4] = input                x : f32[6/rows 4] = input             rows
    h : f32[6 8] = mm(x, w)       →     h : f32[6/rows 8] = mm(x, w)          rows, each of one of its own
    s : f32[] = sum(h)                  s : f32[] +rows = sum(h)              a sum over rows
    n : f32[8] = amax(h, [0])           n : f32[8] = amax(h as [6 8], [0])    rows have met
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import behind, is_getitem, name_of, operands, record_of
from autopar.ir.ops.seeded_random import is_drawn, source_of
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.plan.choice import place_of
from autopar.plan.propagation import Completion, Wanted
from autopar.rules.binding import bind_node
from autopar.rules.registry import op_name
from autopar.step.graph_builder import GraphBuilder, type_of

aten = torch.ops.aten
AXIS = "rows"
FILLED = {aten.full.default, aten.ones.default, aten.zeros.default, aten.full_like.default, aten.ones_like.default, aten.zeros_like.default}
DRAWN_TOGETHER = {"randperm", "multinomial"}  # an element depends on the others
OWN_STATISTICS = "batch_norm"  # whose rows meet in each micro-batch, as in any loop that accumulates gradients


class BatchIndependence:
    """The forward of a traced program, seen so.

    Args:
        values: what it is seen for.
        cut: the names of the inputs of which a micro-batch has its rows.

    Attributes:
        count: of rows of a micro-batch, in the first of these. With one row nothing can be seen.
        varying: the values that one micro-batch has otherwise than another.
    """

    def __init__(self, program: Program, values: Sequence[fx.Node], cut: Collection[str], device: torch.device) -> None:
        inputs = {node: type_of(node).shape for node in program.placeholders if record_of(node).role == "input" and name_of(node) in cut}
        self.count = next((shape[0] for shape in inputs.values()), 1)
        self.varying: set[fx.Node] = set()
        for node in program.nodes:
            if (node in inputs or record_of(node).role in ("seed", "state")) if node.op == "placeholder" else not self.varying.isdisjoint(operands(node)):
                self.varying.add(node)
        self._same: dict[fx.Node, fx.Node] = {}
        self._placed: Completion | None = None
        if self.count > 1:
            self._place(program, values, inputs, device)

    def _place(self, program: Program, values: Sequence[fx.Node], inputs: Mapping[fx.Node, Sequence[int]], device: torch.device) -> None:
        made, needed, same = GraphBuilder(device), behind(values), self._same
        for node in program.nodes:
            if node in needed:
                same[node] = made.placeholder(node.name, _drawing(record_of(node))) if node.op == "placeholder" else made.copy(node, same, program.constants)
        split = {same[node].name: DistAttr.split(AXIS, *[None] * (len(shape) - 1)) for node, shape in inputs.items() if node in same}
        self._placed = Completion(made.program([same[value] for value in values]), Wanted(Mesh({AXIS: 2}), split))
        self._placed.run()

    def are_in(self, node: fx.Node) -> bool:
        """Whether a value has a part of each row, which is of that row alone if rows have not met."""
        type = self._type(node)
        return type is None or any(AXIS in axes for dim in type.attr.dims for _, axes in dim)

    def are_added_in(self, node: fx.Node) -> bool:
        """Whether a value is a sum over rows."""
        type = self._type(node)
        return type is None or bool(type.attr.pending)

    def lie_in(self, node: fx.Node) -> list[tuple[int, int]]:
        """The dims of a value in which rows are, each with the part of it."""
        type = self._type(node)
        return [] if type is None else [(d, k) for d, dim in enumerate(type.attr.dims) for k, (_, axes) in enumerate(dim) if AXIS in axes]

    def _type(self, node: fx.Node) -> TensorType | None:
        type = None if self._placed is None else self._placed.types[self._same[node]]
        return type if isinstance(type, TensorType) else None

    def meet(self, values: Iterable[fx.Node]) -> list[fx.Node]:
        """Where rows meet, in what these values are made of; in order. Linear in it."""
        placed = self._placed
        if placed is None:
            return []
        found = []
        for node in behind(values):
            call, new = record_of(node).call, self._same[node]
            if node.op != "call_function" or node not in self.varying or (call is not None and OWN_STATISTICS in call.op):
                continue
            for value, need in zip(operands(new), placed.uses[new], strict=True):
                have = placed.types[value]
                if need is None or not isinstance(have, TensorType) or have.layout == need.layout:
                    continue
                place = place_of(AXIS, need.layout.attr)
                if have.attr.axes or place is None or not _repeats(value, place[0]):
                    found.append(node)
                    break
        return sorted(found)


def _drawing(record: Record) -> Record:
    """With ``random="single"`` the draws of a step are those of a single device, one after the other; for each row they are some, as ever."""
    return record._replace(type=TensorType((), torch.int64)) if record.role == "seed" else record


def _repeats(node: fx.Node, dim: int) -> bool:
    """Whether a value that all micro-batches have alike is the same all along a dim, and so that of the whole batch, only shorter.

    What is drawn anew for each row counts as the same. A look-up by such an index, or into what is the same all along, is the same too.
    """
    known: dict[tuple[fx.Node, int], bool] = {}
    open_ = [(node, dim)]
    while open_:  # a value is answered when all that it depends on is
        value, d = one = open_[-1]
        needs = _repeats_where(value, d) if one not in known else []
        if unknown := [need for group in needs for need in group if need not in known]:
            open_ += unknown
            continue
        known.setdefault(one, all(any(known[need] for need in group) for group in needs))
        open_.pop()
    return known[node, dim]


def _repeats_where(value: fx.Node, dim: int) -> list[list[tuple[fx.Node, int]]]:
    """What must repeat for a value to repeat along a dim: of each group one; an empty group can never."""
    type = record_of(value).type
    if value.target in FILLED or _is_drawn_apart(value) or (isinstance(type, TensorType) and type.shape[dim] == 1):
        return []
    if value.op != "call_function" or not isinstance(type, TensorType):
        return [[]]
    op, k = value.args if is_getitem(value) else (value, 0)
    bound = bind_node(op)  # type: ignore[arg-type]
    factors = set((bound.results[k] or {dim: ()})[dim])  # type: ignore[index,misc]
    held = [(k, e) for k, dims in enumerate(bound.operands) for e, own in enumerate(dims) if not factors.isdisjoint(own)]
    if not factors.isdisjoint(bound.whole) or not (held or value.target is aten.expand.default):
        return [[]]
    return [_looked_up(op, operands(op)[k], e) for k, e in held]  # type: ignore[arg-type]


def _is_drawn_apart(value: fx.Node) -> bool:
    """Whether a value is drawn, each element without regard to the others."""
    if not is_drawn(value.target):
        return False
    name = op_name(source_of(value.target))
    return name not in DRAWN_TOGETHER or (name == "multinomial" and True in value.args)  # with replacement


def _looked_up(node: fx.Node, value: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """An operand and a dim of it; of an index, the dim that it looks into as well: where that repeats, it does not matter which are taken."""
    if node.target is not aten.index.Tensor or value is node.args[0]:
        return [(value, dim)]
    return [(value, dim), (node.args[0], next(k for k, index in enumerate(node.args[1]) if index is value))]  # type: ignore[arg-type,list-item]
