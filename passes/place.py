"""Place: every value and every use gets a Layout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.layout import Dim, DistAttr, Layout
from autopar.mesh import Mesh
from autopar.passes.manager import Pass
from autopar.program import Program, is_getitem, operands, record_of
from autopar.record import Record, Requirement, TensorType, ValueType
from autopar.rules.binding import Bound, Strategy, axes_of, bind_node
from autopar.transitions import cost


@dataclass(frozen=True)
class Place(Pass):
    """Complete the user's constraints, in graph order.

        x : f32[32/dp 64] = input                              x : f32[32/dp 64] = input
        up : f32[256/tp 64] = param                    →       up : f32[256/tp 64] = param
        t : f32[64 256] = t(up)                                t : f32[64 256/tp] = t(up)
        mm : f32[32 256] = mm(x, t)                            mm : f32[32/dp 256/tp] = mm(x, t)

    Each op takes one of the splits that its operands already have. Over an axis that splits the inputs, data stays where
    it is and parameters come to it; over the other axes parameters stay and data comes to them; then the fewest bytes
    decide. A pending sum waits through views and through additions whose operands are all pending, and is reduced
    before any other use. A tangent lies as its value does, a gradient leaves in its parameter's Layout, and returned
    values are reduced. Values without operands are replicated.

    Attributes:
        mesh: the mesh; the program's own when it has one.
        constraints: placeholder → DistAttr; a Layout that a placeholder already has is one too. Others are replicated.
    """

    name: ClassVar[str] = "place"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "placed"

    mesh: Mesh | None = None
    constraints: Mapping[str, DistAttr] = field(default_factory=dict)

    def run(self, program: Program) -> None:
        mesh = self.mesh or program.mesh
        if mesh is None:
            raise ValueError("place needs a mesh: Place(mesh=Mesh(dp=2))")
        program.mesh = mesh
        completion = _Completion(program, mesh, self.constraints)
        types, uses = completion.run()
        with program.edit() as edit:
            for node, type in types.items():
                edit.annotate(node, type=type, uses=uses.get(node, ()))


class _Completion:
    def __init__(self, program: Program, mesh: Mesh, constraints: Mapping[str, DistAttr]) -> None:
        self.program, self.mesh, self.constraints = program, mesh, constraints
        self.types: dict[fx.Node, ValueType] = {}
        self.parameters: set[fx.Node] = set()  # and what is computed from them alone
        self.data_axes: set[str] = set()  # those that split an input
        self.uses: dict[fx.Node, tuple[Requirement | None, ...]] = {}

    def run(self) -> tuple[dict[fx.Node, ValueType], dict[fx.Node, tuple[Requirement | None, ...]]]:
        tangents = [node for node in self.program.placeholders if record_of(node).role == "tangent"]
        for node in self.program.nodes:
            record = record_of(node)
            begun = node.op == "call_function" and record.phase != "forward"
            if tangents and (begun or node.op == "output"):
                self.place_tangents(tangents)
                tangents = []
            if node in tangents:
                continue
            if node.op == "output":
                self.types[node] = None
                self.uses[node] = self.edges(node, record)
            elif node.op == "call_function" and not is_getitem(node):
                self.types[node], self.uses[node] = self.choose(node, record)
            elif is_getitem(node):
                self.types[node] = self.types[node.args[0]][node.args[1]]  # type: ignore[index]
                self.uses[node] = (None,)
            else:
                self.types[node] = self.given(node, record)
        return self.types, self.uses

    def given(self, node: fx.Node, record: Record) -> TensorType:
        type = record.type
        assert isinstance(type, TensorType)
        attr = self.constraints.get(node.name, type.attr).normalize(type.shape, self.mesh)
        if record.role == "input":
            self.data_axes.update(attr.axes)
        else:
            self.parameters.add(node)
        return replace(type, layout=Layout(self.mesh, attr))

    def place_tangents(self, tangents: list[fx.Node]) -> None:
        output = self.program.output
        returned = [v for v, r in zip(operands(output), record_of(output).results, strict=True) if r.kind == "return"]
        for node in tangents:
            index = record_of(node).index
            assert index is not None
            value = self.types[returned[index]]
            assert isinstance(value, TensorType)
            self.types[node] = replace(value, layout=Layout(self.mesh, at_edge(value, self.mesh)))

    def edges(self, node: fx.Node, record: Record) -> tuple[Requirement | None, ...]:
        """Returned values are reduced and lie as DTensor can say; gradients and states lie as what they belong to."""
        homes = {p.name: self.types[p] for p in self.program.placeholders if p in self.types}
        needs = []
        for value, result in zip(operands(node), record.results, strict=True):
            type = self.types[value]
            assert isinstance(type, TensorType)
            home = homes.get(result.of)
            attr = home.attr if isinstance(home, TensorType) else at_edge(type, self.mesh)
            needs.append(Requirement(Layout(self.mesh, attr), type.dtype))
        return tuple(needs)

    def choose(self, node: fx.Node, record: Record) -> tuple[ValueType, tuple[Requirement | None, ...]]:
        try:
            bound = bind_node(node)
        except RuleError as error:
            where = f"\n    {record.source}   in module {record.module or 'the root'}" if record.source else ""
            raise RuleError(f"{node.name}: {error}{where}") from None
        operand_nodes = operands(node)
        if operand_nodes and self.parameters.issuperset(operand_nodes):
            self.parameters.add(node)
        data = frozenset(self.data_axes)
        others = frozenset(self.mesh.names) - data
        staying = tuple(others if value in self.parameters else data for value in operand_nodes)
        values = [self.types[value] for value in operand_nodes]
        homes = tuple(v.attr for v in values)  # type: ignore[union-attr]
        dtypes = tuple(v.dtype for v in values)  # type: ignore[union-attr]
        needs, gives = cheapest(bound, homes, dtypes, staying, self.mesh)
        uses = tuple(Requirement(Layout(self.mesh, a), dtype) for a, dtype in zip(needs, dtypes, strict=True))
        return self.laid(record.type, gives), uses

    def laid(self, type: ValueType, attrs: tuple[DistAttr | None, ...]) -> ValueType:
        placed = tuple(
            None if one is None or attr is None else replace(one, layout=Layout(self.mesh, attr))
            for one, attr in zip(type if isinstance(type, tuple) else (type,), attrs, strict=True)
        )
        return placed if isinstance(type, tuple) else placed[0]


def at_edge(type: TensorType, mesh: Mesh) -> DistAttr:
    """The Layout of a value at the program's edge: reduced, merged dims and unusual axis orders gathered."""
    order = {axis: k for k, axis in enumerate(mesh.names)}
    dims = tuple(
        dim if len(dim) == 1 and list(dim[0][1]) == sorted(dim[0][1], key=order.__getitem__) else ((None, ()),)
        for dim in type.attr.dims
    )
    return DistAttr(dims).normalize(type.shape, mesh)


@lru_cache(maxsize=65536)
def cheapest(
    bound: Bound,
    homes: tuple[DistAttr, ...],
    dtypes: tuple[torch.dtype, ...],
    staying: tuple[frozenset[str], ...],
    mesh: Mesh,
) -> tuple[tuple[DistAttr, ...], tuple[DistAttr | None, ...]]:
    """The best strategy for operands that lie as ``homes``.

    Best is to take away the fewest splits over axes on which the operand should stay, then to move the fewest bytes,
    then to change the fewest operands.
    """
    held = [
        {f: dim for row in bound.factor_splits(dims, shape, home, mesh) if row for f, dim in row.items()}
        for dims, shape, home in zip(bound.operands, bound.operand_shapes, homes, strict=True)
    ]
    axes = [axis for axis in mesh.names if any(axis in home.axes for home in homes)]
    options = [_options(bound, homes, held, axis) for axis in axes]
    best = None
    for combination in itertools.product(*options):
        strategy = _strategy(dict(zip(axes, combination, strict=True)), held, mesh)
        if not all(bound.takes(factor, dim, mesh) for factor, dim in strategy.split):
            continue
        needs, gives = bound.place(strategy, mesh)
        lost = paid = changed = 0
        for need, home, shape, dtype, stays in zip(needs, homes, bound.operand_shapes, dtypes, staying, strict=True):
            if need != home:
                lost += sum(_place_of(axis, need) != _place_of(axis, home) for axis in stays if _place_of(axis, home))
                paid += cost(TensorType(shape, dtype, Layout(mesh, home)), TensorType(shape, dtype, Layout(mesh, need)))
                changed += 1
        if best is None or (lost, paid, changed) < best[0]:
            best = ((lost, paid, changed), needs, gives)
    assert best is not None
    return best[1], best[2]


def _place_of(axis: str, attr: DistAttr) -> tuple[int, int] | None:
    """The dim and part that ``axis`` splits."""
    return next(
        ((d, k) for d, dim in enumerate(attr.dims) for k, (_, axes) in enumerate(dim) if axis in axes), None
    )


Option = tuple[str, object] | None


def _options(bound: Bound, homes: tuple[DistAttr, ...], held: list[dict[str, Dim]], axis: str) -> list[Option]:
    """What an axis may do: split a factor that an operand has split over it, pass a pending sum, or nothing."""
    found: dict[Option, None] = {}
    for row in held:
        for factor, dim in row.items():
            if axis in axes_of(dim) and factor not in bound.whole:
                found[("split", factor)] = None
    for index, alternative in enumerate(bound.linear):
        waits = bound.rule.view or len(alternative) > 1
        if waits and all((axis, "sum") in homes[position].pending for position in alternative):
            found[("pass", index)] = None
    found[None] = None
    return list(found)


def _strategy(chosen: Mapping[str, Option], held: list[dict[str, Dim]], mesh: Mesh) -> Strategy:
    split: dict[str, list[str]] = {}
    passing = []
    for axis, option in chosen.items():
        if option is None:
            continue
        if option[0] == "split":
            split.setdefault(str(option[1]), []).append(axis)
        else:
            passing.append((axis, option[1]))
    chosen_split = {factor: _restricted(factor, axes, held, mesh) for factor, axes in split.items()}
    return Strategy(tuple(sorted(chosen_split.items())), tuple(sorted(passing)))  # type: ignore[arg-type]


def _restricted(factor: str, axes: list[str], held: list[dict[str, Dim]], mesh: Mesh) -> Dim:
    """The factor split over just ``axes``: as the operand with most of them has it, the others last."""
    best = max((row[factor] for row in held if factor in row), key=lambda dim: len({*axes_of(dim)} & {*axes}))
    kept = tuple((size, tuple(axis for axis in own if axis in axes)) for size, own in best)
    missing = tuple(axis for axis in mesh.names if axis in axes and axis not in axes_of(best))
    return ((kept[0][0], kept[0][1] + missing), *kept[1:])
