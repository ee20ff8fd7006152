"""Propagate layouts: from a few constraints to a Layout for every value and every use, greedily, in graph order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from autopar.capture.decompose.expansions import opened_factors
from autopar.costs.machine import Machine
from autopar.errors import RuleError, at_line
from autopar.ir.dtensor import edge_of
from autopar.ir.layout import Dim, DistAttr, Layout, layout_of
from autopar.ir.mesh import EXPERTS, Mesh
from autopar.ir.nodes import element_of, is_getitem, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, TensorType, ValueType, requirement_of
from autopar.ir.value_names import LOSS, gradient_parameter
from autopar.plan.choice import Aim, Opened, cheapest, opened, place_of
from autopar.rules.binding import axes_of, bind_node
from autopar.rules.pointwise import CASTS
from autopar.rules.registry import RULES


@dataclass(frozen=True)
class PropagationOptions:
    """The constraints and options of a layout propagation.

    Attributes:
        mesh: the mesh.
        constraints: node → DistAttr; a Layout that a node of the traced program already has is a constraint too. Other
            placeholders are replicated. All readers of a constrained result read it in this layout; dims with ``?`` are
            free.
        strict: refuse ops without a rule; else they run on whole operands on every rank.
        whole: whether returned values are gathered.
        machine: the machine whose nanoseconds are compared; without one moved bytes are.
    """

    mesh: Mesh
    constraints: Mapping[str, DistAttr] = field(default_factory=dict)
    strict: bool = False
    whole: bool = False
    machine: Machine | None = None


class LayoutPropagation:
    """Propagates layouts in one walk over a traced program.

    Attributes:
        types: node → the type of its result, with a Layout.
        uses: node → the Layouts and dtypes that it requires of its operands.
        split: with ``expanding``, ops that would be split along a factor that they need whole → the split of that dim.
    """

    def __init__(self, program: Program, wanted: PropagationOptions, *, expanding: bool = False) -> None:
        self.program, self.mesh, self.constraints = program, wanted.mesh, wanted.constraints
        self.strict, self.whole, self.expanding = wanted.strict, wanted.whole, expanding
        self.machine = wanted.machine
        self.split: dict[fx.Node, Dim] = {}
        self.types: dict[fx.Node, ValueType] = {}
        self.read_types: dict[fx.Node, TensorType] = {}  # constrained value → the type that its readers read
        self.sums = gradient_sums(program)
        self.adds_up = {
            user
            for sum in self.sums
            for user in sum.users
            if user.target in ADDITIONS and not self.is_decided(sum, record_of(sum))
        }
        self.parameters: set[fx.Node] = set()  # parameters, and values computed from them alone
        self.data_axes: set[str] = set()  # axes that split an input
        self.uses: dict[fx.Node, tuple[Requirement | None, ...]] = {}
        self.aims: dict[fx.Node, Aim] = {}

    def run(self) -> None:
        tangents = [node for node in self.program.placeholders if record_of(node).role == "tangent"]
        forward = True
        for node in self.program.nodes:
            record = record_of(node)
            if forward and (node.op == "output" or (node.op == "call_function" and record.phase != "forward")):
                forward = False
                self.place_tangents(tangents)
                self.aims |= gradient_aims(
                    self.program, self.types, frozenset(self.mesh.names) - (self.data_axes - {EXPERTS}), self.mesh
                )
                tangents = []
            if node in tangents:
                continue
            if node.op == "output":
                self.types[node] = None
                self.uses[node] = self.edges(node, record)
            elif node in self.sums and not self.is_decided(node, record):
                continue  # gets its Layout with its first addend
            elif node.op == "placeholder" or node.op == "get_attr":
                self.types[node] = self.input_type(node, record)
            else:
                self.follow_gradient(node)
                self.constrain(node, record)
                if is_getitem(node):
                    source, index = element_of(node)
                    types = self.types[source]
                    assert isinstance(types, tuple)
                    self.types[node] = types[index]
                    self.uses[node] = (None,)
                else:
                    self.types[node], self.uses[node] = self.choose(node, record)
                    if (dim := self.split_along(node)) is not None:
                        self.split[node] = dim
                if (values := operands(node)) and self.parameters.issuperset(values):
                    self.parameters.add(node)
                self.set_read_type(node)
                self.settle(node)

    def input_type(self, node: fx.Node, record: Record) -> TensorType:
        type = record.type
        assert isinstance(type, TensorType)
        attr = self.constraints.get(node.name, type.attr).normalize(type.shape, self.mesh)
        if record.role == "input":
            self.data_axes.update(attr.axes)
            return replace(type, layout=layout_of(self.mesh, attr))
        self.parameters.add(node)
        if node in self.sums:  # internal to the step: no user sees it
            home = type.attr.normalize(type.shape, self.mesh) if type.layout else attr
        else:
            home = edge_of(attr, self.mesh, type.shape, strided=True)
        if home != attr:
            self.read_types[node] = replace(type, layout=layout_of(self.mesh, attr))
        return replace(type, layout=layout_of(self.mesh, home))

    def is_decided(self, node: fx.Node, record: Record) -> bool:
        return node.name in self.constraints or (isinstance(record.type, TensorType) and record.type.layout is not None)

    def follow_gradient(self, node: fx.Node) -> None:
        """Give a sum of gradients the layout of its parameter.

        It is pending over axes over which the gradient is pending and the parameter not split.
        """
        for sum in operands(node):
            if sum in self.sums and sum not in self.types:
                (addend,) = (value for value in operands(node) if value is not sum)
                addend_type, parameter, type = self.read(addend), self.sums[sum], record_of(sum).type
                assert isinstance(addend_type, TensorType) and isinstance(type, TensorType)
                home = None if parameter is None else self.types[parameter]
                dims = home.attr.dims if isinstance(home, TensorType) else DistAttr.replicated(len(type.shape)).dims
                split_axes = {axis for dim in dims for _, axes in dim for axis in axes}
                pending = tuple((axis, kind) for axis, kind in addend_type.attr.pending if axis not in split_axes)
                self.types[sum] = replace(type, layout=layout_of(self.mesh, DistAttr(dims, pending)))
                self.parameters.add(sum)

    def constrain(self, node: fx.Node, record: Record) -> None:
        layout = record.type.layout if isinstance(record.type, TensorType) else None
        attr = self.constraints.get(node.name, None if layout is None else layout.attr)
        if attr is not None:
            self.aims[node] = Aim(attr)

    def set_read_type(self, node: fx.Node) -> None:
        """Let all readers of a constrained value read it in the layout of the constraint.

        The transfers follow from that.
        """
        aim, type = self.aims.get(node), self.types[node]
        if aim is not None and not aim.firm and isinstance(type, TensorType):
            attr = aim.filled(type.attr).normalize(type.shape, self.mesh)
            self.read_types[node] = replace(type, layout=layout_of(self.mesh, attr))

    def settle(self, node: fx.Node) -> None:
        """Choose the layout in which all readers read a pending value.

        It is reduced to the split of an operand of its shape that was gathered for its op (so the gradient of keys is
        split as the keys were), or to the split that one reader needs, if all readers need it reduced. Else, if one
        reader needs it reduced with its splits unchanged, all read it so, because then it need not be kept in both
        forms.
        """
        type = self.types[node]
        if node in self.read_types or not isinstance(type, TensorType) or not type.attr.pending:
            return
        split = self.gathered_alike(node, type) or self.needed_split(node, type)
        if split is None and any(self.needs_reduced(user, node, type) for user in node.users):
            split = layout_of(self.mesh, type.attr.without_pending())
        if split is not None:
            self.read_types[node] = replace(type, layout=split)

    def gathered_alike(self, node: fx.Node, type: TensorType) -> Layout | None:
        op = node.args[0] if is_getitem(node) else node
        assert isinstance(op, fx.Node)
        pending = {axis for axis, _ in type.attr.pending}
        for value, need in zip(operands(op), self.uses[op], strict=True):
            home = self.read(value)
            if need is not None and isinstance(home, TensorType) and home.shape == type.shape and not home.attr.pending:
                given_up = pending.intersection(home.attr.axes) - set(need.placed.attr.axes)
                if given_up == pending and type.attr.without_pending() == need.placed.attr:
                    return home.layout
        return None

    def needed_split(self, node: fx.Node, type: TensorType) -> Layout | None:
        split = None
        for user in node.users:
            if user.op == "output" or is_getitem(user):
                return None
            values = operands(user)
            if not all(value in self.types for value in values):
                return None
            _, needs = self.choose(user, record_of(user))
            for value, need in zip(values, needs, strict=True):
                if value is node and need is not None:
                    if set(need.placed.attr.pending) & set(type.attr.pending):
                        return None
                    if any(place_of(axis, need.placed.attr) for axis, _ in type.attr.pending):
                        split = split or need.layout
        return split

    def needs_reduced(self, user: fx.Node, node: fx.Node, type: TensorType) -> bool:
        """Return whether a reader needs a pending value reduced, with its splits unchanged.

        All operands of the reader have layouts.
        """
        values = operands(user)
        if (
            user.op == "output"
            or is_getitem(user)
            or len(node.users) < 2
            or not all(value in self.types for value in values)
        ):
            return False
        _, needs = self.choose(user, record_of(user))
        whole = type.attr.without_pending()
        return any(
            value is node and need is not None and need.placed.attr == whole
            for value, need in zip(values, needs, strict=True)
        )

    def read(self, node: fx.Node) -> ValueType:
        return self.read_types.get(node) or self.types[node]

    def tensor(self, node: fx.Node) -> TensorType:
        """Return the type of an operand, which is one tensor, as its readers read it."""
        type = self.read(node)
        assert isinstance(type, TensorType)
        return type

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
        """Return the required Layouts of the results.

        Returned values are reduced and in a layout that DTensor can express; gradients and states are as their
        parameters and states.
        """
        homes = {p.name: self.types[p] for p in self.program.placeholders if p in self.types}
        needs = []
        dtypes = required_dtypes(record, [self.tensor(value) for value in operands(node)])
        for value, result, dtype in zip(operands(node), record.results, dtypes, strict=True):
            type = self.read(value)
            assert isinstance(type, TensorType)
            home = homes.get(result.of)
            attr = home.attr if isinstance(home, TensorType) else self.at_edge(type)
            needs.append(requirement_of(self.mesh, attr, dtype))
        return tuple(needs)

    def choose(self, node: fx.Node, record: Record) -> tuple[ValueType, tuple[Requirement | None, ...]]:
        try:
            bound = bind_node(node, strict=self.strict)
        except RuleError as error:
            raise RuleError(f"{node.name}: {error}{where(record)}") from None
        if bound.why in UNSTEADY:
            raise RuleError(
                f"{node.name}: {bound.rule.op} has no sharding rule, and {bound.why}, so that ranks would hold "
                f"different values of one{where(record)}\n  tag it: torch.library.custom_op(..., "
                f"tags=[torch.Tag.nondeterministic_seeded]) draws from the step's seed"
            )
        operand_nodes = operands(node)
        data = frozenset(self.data_axes)
        if any(value in self.parameters and EXPERTS in self.tensor(value).attr.axes for value in operand_nodes):
            data -= {EXPERTS}
        others = frozenset(self.mesh.names) - data
        staying = tuple(others if value in self.parameters else data for value in operand_nodes)
        values = [self.tensor(value) for value in operand_nodes]
        required = required_dtypes(record, values)
        homes = tuple(
            v.attr if rounds_nothing(v, dtype) else v.attr.without_pending()
            for v, dtype in zip(values, required, strict=True)
        )
        dtypes = tuple(v.dtype for v in values)
        needs, gives = cheapest(bound, homes, dtypes, staying, self.mesh, self.aims.get(node), self.opened(node),
                                self.passing_operands(node, operand_nodes, homes), self.machine)  # fmt: skip
        uses = tuple(requirement_of(self.mesh, a, dtype) for a, dtype in zip(needs, required, strict=True))
        return self.with_layouts(record.type, gives), uses

    def passing_operands(self, node: fx.Node, values: Sequence[fx.Node], homes: Sequence[DistAttr]) -> frozenset[int]:
        """Return the operands whose pending sum should pass, or that should become pending.

        A pending sum passes if fewer elements are reduced after all its readers than here. An operand of an addition
        becomes pending beside a pending operand if the result is added to a sum of gradients or losses.
        """
        if node.target in ADDITIONS and self.least[node] == 0 and node not in self.adds_up:
            return frozenset(k for k, home in enumerate(homes) if not home.pending)
        return frozenset(
            k for k, (value, home) in enumerate(zip(values, homes, strict=True))
            if home.pending and _passes(node, k) and self.reduced_behind(value) < _size(value)
        )  # fmt: skip

    def reduced_behind(self, value: fx.Node) -> float:
        """Return how many elements are reduced if a pending value is not reduced here.

        A value that is added to another pending value costs none.
        """
        if len(value.users) > READERS or not all(self.passes_on(user, value) for user in value.users):
            return math.inf
        return sum(
            0 if user.users and all(self.adds_to_pending(reader, user) for reader in user.users) else self.least[user]
            for user in value.users
        )  # fmt: skip

    @cached_property
    def least(self) -> dict[fx.Node, float]:
        """Return how many elements of a value are reduced at least, if it is pending.

        It may be reduced here or after its readers. Linear in the graph.
        """
        least: dict[fx.Node, float] = {}
        for node in reversed(self.program.graph.nodes):
            if node.op == "call_function":
                passed = 0 < len(node.users) <= READERS and all(self.passes_on(user, node) for user in node.users)
                later = (
                    sum(least[user] / (len(operands(user)) if user.target in ADDITIONS else 1) for user in node.users)
                    if passed
                    else math.inf
                )
                least[node] = 0 if node in self.adds_up else min(_size(node), later)
        return least

    def passes_on(self, user: fx.Node, value: fx.Node) -> bool:
        """Return whether a pending value passes through a reader.

        Terms of a loss, which are scalars, pass: they are added first and reduced once.
        """
        return user in self.adds_up or _passes_all(user, value) or (user.target in ADDITIONS and _size(user) == 1)

    def adds_to_pending(self, user: fx.Node, node: fx.Node) -> bool:
        if user.target not in ADDITIONS:
            return False
        others = [self.types.get(value) for value in operands(user) if value is not node]
        return all(isinstance(type, TensorType) and bool(type.attr.pending) for type in others)

    def opened(self, node: fx.Node) -> Opened:
        """Return the factors that must be whole unless the op is expanded, each with the fewest elements for that."""
        return opened_factors(node) if self.expanding else ()

    def split_along(self, node: fx.Node) -> Dim | None:
        """Return the split of an op along such a factor; ``None`` if it has none."""
        if not (factors := self.opened(node)):
            return None
        type = self.types[node]
        needs = [use.placed.attr for use in self.uses[node] if use is not None]
        gives = [None if part is None else part.attr for part in (type if isinstance(type, tuple) else (type,))]
        split = bind_node(node).splits(needs, gives, self.mesh)
        return next((split[factor] for factor, _ in factors if axes_of(split.get(factor, ()))), None)

    def with_layouts(self, type: ValueType, attrs: tuple[DistAttr | None, ...]) -> ValueType:
        placed = tuple(
            None if part is None or attr is None else replace(part, layout=layout_of(self.mesh, attr))
            for part, attr in zip(type if isinstance(type, tuple) else (type,), attrs, strict=True)
        )
        return placed if isinstance(type, tuple) else placed[0]


READERS = 4  # the most readers of a value that is reduced after them, because each reduction has a start-up cost


def _passes_all(user: fx.Node, value: fx.Node) -> bool:
    return all(_passes(user, k) for k, operand in enumerate(operands(user)) if operand is value)


def _passes(node: fx.Node, position: int) -> bool:
    """Return whether a sum passes through an op by this operand alone, and the result has no more elements."""
    if node.op != "call_function" or node.target not in RULES:
        return False
    try:
        bound = bind_node(node)
    except RuleError:  # raised again when the walk reaches this op, with its line
        return False
    if (position,) not in bound.linear or bound.result_shapes[0] is None or len(bound.result_shapes) > 1:
        return False
    return math.prod(bound.result_shapes[0]) <= math.prod(bound.operand_shapes[position])


def _size(node: fx.Node) -> float:
    type = record_of(node).type
    return math.prod(type.shape) if isinstance(type, TensorType) else math.inf


UNSTEADY = ("it draws random numbers", "it gives another result the second time")  # reasons why no rule was discovered

ADDITIONS = {torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor}


def gradient_sums(program: Program) -> dict[fx.Node, fx.Node | None]:
    """Return the states in which gradients of parameters add up → the parameter, and those of losses.

    Examples: ``up.weight.grad`` → ``up.weight``, and ``.loss``.
    """
    named = {name_of(node): node for node in program.placeholders}
    sums: dict[fx.Node, fx.Node | None] = {}
    for name, node in named.items():
        parameter = gradient_parameter(name) or ""
        type = record_of(node).type
        # of a parameter that an update only measures
        waits = isinstance(type, TensorType) and type.layout is not None and bool(type.layout.attr.pending)
        if record_of(node).role in ("state", "buffer") and (
            (parameter and (parameter in named or waits)) or name == LOSS
        ):
            sums[node] = named.get(parameter)
    return sums


def required_dtypes(record: Record, values: Sequence[TensorType]) -> tuple[torch.dtype, ...]:
    """Return the dtype in which each operand is used: as the traced program requires, or else its own."""
    needs = record.uses or (None,) * len(values)
    return tuple(value.dtype if need is None else need.dtype for value, need in zip(values, needs, strict=True))


def rounds_nothing(type: TensorType, dtype: torch.dtype) -> bool:
    """Return whether a value can be cast while it is pending; a value that is narrowed must be reduced first."""
    return type.dtype == dtype or torch.promote_types(type.dtype, dtype) == dtype


def gradient_aims(
    program: Program, types: Mapping[fx.Node, ValueType], axes: frozenset[str], mesh: Mesh
) -> dict[fx.Node, Aim]:
    """Return an aim for each gradient: to be computed in its parameter's layout over ``axes``.

    Parameters stay on ``axes``. Aims pass backwards through views, additions and casts.
    """
    aims: dict[fx.Node, Aim] = {}
    homes = {node.name: type for node, type in types.items() if node.op == "placeholder"}
    parameter_of = {
        sum.name: parameter.name for sum, parameter in gradient_sums(program).items() if parameter is not None
    }
    output = program.output
    for value, result in zip(operands(output), record_of(output).results, strict=True):
        home = (
            homes.get(parameter_of.get(result.of, result.of))
            if result.kind == "grad" or result.of in parameter_of
            else None
        )
        if isinstance(home, TensorType) and axes.intersection(home.attr.axes):
            aims[value] = Aim(opened(home.attr, axes), firm=True)
    for node in reversed(program.graph.nodes):
        if node not in aims or node.op != "call_function" or is_getitem(node):
            continue
        bound = bind_node(node)
        if node.target in ADDITIONS:
            same = [value for value in operands(node) if record_of(value).type == record_of(node).type]
            aims |= {value: aims[node] for value in same if value not in aims and value.op == "call_function"}
        elif node.target in CASTS:
            aims.setdefault(operands(node)[0], aims[node])
        elif bound.rule.view and len(bound.results) == len(bound.operands) == 1:
            attr = bound.before(aims[node].attr, mesh)
            if attr is not None and attr.axes:
                aims.setdefault(operands(node)[0], Aim(opened(attr, axes), firm=True))
    return aims


def where(record: Record) -> str:
    """Return the user's line and module on a separate line."""
    return f"\n{at_line(record.source, record.module)}" if record.source else ""
