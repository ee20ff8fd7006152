"""Place: every value and every use gets a Layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import fx

from autopar.choice import Aim, cheapest, opened, place_of
from autopar.dtensor import edge_of
from autopar.errors import RuleError, at_line
from autopar.layout import DistAttr, layout_of
from autopar.mesh import Mesh
from autopar.passes.manager import Pass
from autopar.program import Program, is_getitem, operands, record_of
from autopar.record import Record, Requirement, TensorType, ValueType, requirement_of
from autopar.rules.binding import bind_node
from autopar.rules.pointwise import CASTS
from autopar.rules.registry import rule_of


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
    before any other use: to a split, where one of its users needs it split. A tangent lies as its value does, a gradient
    leaves in its parameter's Layout and is made there over the axes on which parameters stay, and returned values are
    reduced. Values without operands are replicated.

    Attributes:
        mesh: the mesh; the program's own when it has one.
        constraints: node → DistAttr; a Layout that a node of the traced program already has is one too. Other
            placeholders are replicated. What an op makes lies so for all who read it; dims with ``?`` lie as they will.
        strict: refuse ops without a rule; else they run on whole operands on every rank, and the report says so.
        whole: returned values are gathered.
    """

    name: ClassVar[str] = "place"
    takes: ClassVar[str] = "traced"
    gives: ClassVar[str] = "placed"

    mesh: Mesh | None = None
    constraints: Mapping[str, DistAttr] = field(default_factory=dict)
    strict: bool = False
    whole: bool = False

    def run(self, program: Program) -> list[str]:
        mesh = self.mesh or program.mesh
        if mesh is None:
            raise ValueError("place needs a mesh: Place(mesh=Mesh(dp=2))")
        program.mesh = mesh
        completion = _Completion(program, mesh, self)
        completion.run()
        with program.edit() as edit:
            for node, type in completion.types.items():
                edit.annotate(node, type=type, uses=completion.uses.get(node, ()))
        return whole_notes(program)


class _Completion:
    def __init__(self, program: Program, mesh: Mesh, asked: Place) -> None:
        self.program, self.mesh, self.constraints, self.strict, self.whole = program, mesh, asked.constraints, asked.strict, asked.whole
        self.types: dict[fx.Node, ValueType] = {}
        self.seen: dict[fx.Node, TensorType] = {}  # constrained values, as those who read them have them
        self.parameters: set[fx.Node] = set()  # and what is computed from them alone
        self.data_axes: set[str] = set()  # those that split an input
        self.uses: dict[fx.Node, tuple[Requirement | None, ...]] = {}
        self.aims: dict[fx.Node, Aim] = {}

    def run(self) -> None:
        tangents = [node for node in self.program.placeholders if record_of(node).role == "tangent"]
        for node in self.program.nodes:
            record = record_of(node)
            begun = node.op == "call_function" and record.phase != "forward"
            if tangents and (begun or node.op == "output"):
                self.place_tangents(tangents)
                self.aims |= gradient_aims(self.program, self.types, frozenset(self.mesh.names) - self.data_axes, self.mesh)
                tangents = []
            if node in tangents:
                continue
            if node.op == "output":
                self.types[node] = None
                self.uses[node] = self.edges(node, record)
            elif node.op == "placeholder" or node.op == "get_attr":
                self.types[node] = self.given(node, record)
            else:
                self.constrain(node, record)
                if is_getitem(node):
                    self.types[node] = self.types[node.args[0]][node.args[1]]  # type: ignore[index]
                    self.uses[node] = (None,)
                else:
                    self.types[node], self.uses[node] = self.choose(node, record)
                    if (values := operands(node)) and self.parameters.issuperset(values):
                        self.parameters.add(node)
                self.see(node)
                self.settle(node)

    def given(self, node: fx.Node, record: Record) -> TensorType:
        type = record.type
        assert isinstance(type, TensorType)
        attr = self.constraints.get(node.name, type.attr).normalize(type.shape, self.mesh)
        if record.role == "input":
            self.data_axes.update(attr.axes)
            return replace(type, layout=layout_of(self.mesh, attr))
        self.parameters.add(node)
        home = edge_of(attr, self.mesh, type.shape, strided=True)
        if home != attr:
            self.seen[node] = replace(type, layout=layout_of(self.mesh, attr))
        return replace(type, layout=layout_of(self.mesh, home))

    def constrain(self, node: fx.Node, record: Record) -> None:
        own = record.type.layout if isinstance(record.type, TensorType) else None
        attr = self.constraints.get(node.name, own and own.attr)
        if attr is not None:
            self.aims[node] = Aim(attr)

    def see(self, node: fx.Node) -> None:
        """Who reads a constrained value reads it as the constraint says; the transfers follow from that."""
        aim, type = self.aims.get(node), self.types[node]
        if aim is not None and not aim.firm and isinstance(type, TensorType):
            attr = aim.given(type.attr).normalize(type.shape, self.mesh)
            self.seen[node] = replace(type, layout=layout_of(self.mesh, attr))

    def settle(self, node: fx.Node) -> None:
        """A pending value that all its users need reduced, and one of them split, is reduced to that split for all."""
        type = self.types[node]
        if node in self.seen or not isinstance(type, TensorType) or not type.attr.pending:
            return
        split = None
        for user in node.users:
            if user.op == "output" or is_getitem(user):
                return
            values = operands(user)
            if not all(value in self.types for value in values):
                return
            _, needs = self.choose(user, record_of(user))
            for value, need in zip(values, needs, strict=True):
                if value is node and need is not None:
                    if set(need.layout.attr.pending) & set(type.attr.pending):
                        return
                    if any(place_of(axis, need.layout.attr) for axis, _ in type.attr.pending):
                        split = split or need.layout
        if split is not None:
            self.seen[node] = replace(type, layout=split)

    def read(self, node: fx.Node) -> ValueType:
        return self.seen.get(node) or self.types[node]

    def place_tangents(self, tangents: list[fx.Node]) -> None:
        output = self.program.output
        returned = [v for v, r in zip(operands(output), record_of(output).results, strict=True) if r.kind == "return"]
        for node in tangents:
            index = record_of(node).index
            assert index is not None
            value = self.read(returned[index])
            assert isinstance(value, TensorType)
            self.types[node] = replace(value, layout=layout_of(self.mesh, self.at_edge(value)))

    def at_edge(self, type: TensorType) -> DistAttr:
        return DistAttr.replicated(len(type.shape)) if self.whole else edge_of(type.attr, self.mesh, type.shape)

    def edges(self, node: fx.Node, record: Record) -> tuple[Requirement | None, ...]:
        """Returned values are reduced and lie as DTensor can say; gradients and states lie as what they belong to."""
        homes = {p.name: self.types[p] for p in self.program.placeholders if p in self.types}
        needs = []
        for value, result in zip(operands(node), record.results, strict=True):
            type = self.read(value)
            assert isinstance(type, TensorType)
            home = homes.get(result.of)
            attr = home.attr if isinstance(home, TensorType) else self.at_edge(type)
            needs.append(requirement_of(self.mesh, attr, type.dtype))
        return tuple(needs)

    def choose(self, node: fx.Node, record: Record) -> tuple[ValueType, tuple[Requirement | None, ...]]:
        try:
            bound = bind_node(node, strict=self.strict)
        except RuleError as error:
            raise RuleError(f"{node.name}: {error}{where(record)}") from None
        operand_nodes = operands(node)
        data = frozenset(self.data_axes)
        others = frozenset(self.mesh.names) - data
        staying = tuple(others if value in self.parameters else data for value in operand_nodes)
        values = [self.read(value) for value in operand_nodes]
        homes = tuple(v.attr for v in values)  # type: ignore[union-attr]
        dtypes = tuple(v.dtype for v in values)  # type: ignore[union-attr]
        needs, gives = cheapest(bound, homes, dtypes, staying, self.mesh, self.aims.get(node))
        uses = tuple(requirement_of(self.mesh, a, dtype) for a, dtype in zip(needs, dtypes, strict=True))
        return self.laid(record.type, gives), uses

    def laid(self, type: ValueType, attrs: tuple[DistAttr | None, ...]) -> ValueType:
        placed = tuple(
            None if one is None or attr is None else replace(one, layout=layout_of(self.mesh, attr))
            for one, attr in zip(type if isinstance(type, tuple) else (type,), attrs, strict=True)
        )
        return placed if isinstance(type, tuple) else placed[0]


ADDITIONS = {torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor}


def gradient_aims(program: Program, types: Mapping[fx.Node, ValueType], axes: frozenset[str], mesh: Mesh) -> dict[fx.Node, Aim]:
    """Over ``axes``, on which parameters stay, a gradient is made where its parameter is: through views, additions and casts."""
    aims: dict[fx.Node, Aim] = {}
    homes = {node.name: type for node, type in types.items() if node.op == "placeholder"}
    output = program.output
    for value, result in zip(operands(output), record_of(output).results, strict=True):
        home = homes.get(result.of) if result.kind == "grad" else None
        if isinstance(home, TensorType) and axes.intersection(home.attr.axes):
            aims[value] = Aim(opened(home.attr, axes), firm=True)
    for node in reversed(program.graph.nodes):
        if node not in aims or node.op != "call_function" or is_getitem(node):
            continue
        bound = bind_node(node)
        if node.target in ADDITIONS:
            same = [value for value in operands(node) if record_of(value).type == record_of(node).type]
            aims |= {value: aims[node] for value in same if value not in aims}
        elif node.target in CASTS:
            aims.setdefault(operands(node)[0], aims[node])
        elif bound.rule.view and len(bound.results) == len(bound.operands) == 1:
            attr = bound.before(aims[node].attr, mesh)
            if attr is not None and attr.axes:
                aims.setdefault(operands(node)[0], Aim(opened(attr, axes), firm=True))
    return aims


def where(record: Record) -> str:
    """The user's line and module, on a line of its own."""
    return f"\n{at_line(record.source, record.module)}" if record.source else ""


def whole_notes(program: Program) -> list[str]:
    """For each op without a rule, in the user's lines: that every rank computes all of it."""
    found: dict[tuple[str, str], list[fx.Node]] = {}
    for node in program.nodes:
        if node.op == "call_function" and not is_getitem(node) and rule_of(node.target).pattern is None:
            found.setdefault((rule_of(node.target).op, where(record_of(node))), []).append(node)
    return [
        f"{op} has no sharding rule: each rank computes all of it, on whole operands ({len(nodes)} times); "
        f"register_rule one, or refuse it with strict=True{place}"
        for (op, place), nodes in found.items()
    ]
