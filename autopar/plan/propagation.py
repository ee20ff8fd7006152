"""Propagate layouts: from a few constraints to a Layout for every value and every use, greedily, in graph order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from autopar.capture.decompose.expansions import opened_factors
from autopar.costs.machine import Machine
from autopar.errors import RuleError
from autopar.ir.layout import Dim, DistAttr, Layout, layout_of
from autopar.ir.mesh import EXPERTS, Mesh
from autopar.ir.nodes import element_of, is_getitem, operands, record_of, tensor_type
from autopar.ir.ops.over_stages import OVER_STAGES
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, TensorType, ValueType, requirement_of
from autopar.plan.boundary import (
    ADDITIONS,
    Boundary,
    addend_of,
    attr_before_cast,
    gradient_sums,
    required_dtypes,
    sum_home,
)
from autopar.plan.choice import Aim, Opened, cheapest, opened, place_of
from autopar.plan.ops_without_rule import usable_rule
from autopar.rules.binding import bind_node, drawn_alike, splits_in_common
from autopar.rules.pointwise import CASTS
from autopar.rules.registry import RULES
from autopar.rules.strategies import Bound, Strategy, axes_of

# -- gradient aims -----------------------------------------------------------------------------------------------------
#
# Aim gradients at the layouts of their parameters, and values that gradients are made of by views, sums and casts.


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


# -- pending sums ------------------------------------------------------------------------------------------------------
#
# Decide whether a pending sum passes through an op or is reduced before it: where fewer elements are reduced.
#
# The decision looks ahead at the readers of a value, before these are placed.


READERS = 4  # the most readers of a value that is reduced after them, because each reduction has a start-up cost


@dataclass(frozen=True, eq=False)
class PendingSums:
    """Where the pending sums of a program are reduced.

    Attributes:
        program: the program.
        additions_to_sums: ops that add to sums of gradients or losses, where what they add may stay pending.
    """

    program: Program
    additions_to_sums: frozenset[fx.Node]

    def passing_operands(
        self, node: fx.Node, homes: Sequence[DistAttr], types: Mapping[fx.Node, ValueType]
    ) -> frozenset[int]:
        """Return the operands whose pending sum should pass, or that should become pending.

        A pending sum passes if fewer elements are reduced after all its readers than here. An operand of an addition
        becomes pending beside a pending operand if the result is added to a sum of gradients or losses.

        Args:
            homes: the attribute of each operand.
            types: the values that are placed already.
        """
        if node.target in ADDITIONS and self.least[node] == 0 and node not in self.additions_to_sums:
            return frozenset(k for k, home in enumerate(homes) if not home.pending)
        return frozenset(
            k for k, (value, home) in enumerate(zip(operands(node), homes, strict=True))
            if home.pending and _passes(node, k) and self.reduced_behind(value, types) < _size(value)
        )  # fmt: skip

    def reduced_behind(self, value: fx.Node, types: Mapping[fx.Node, ValueType]) -> float:
        """Return how many elements are reduced if a pending value is not reduced here.

        A value that is added to another pending value costs none.
        """
        if len(value.users) > READERS or not all(self.passes_on(user, value) for user in value.users):
            return math.inf
        return sum(
            0
            if user.users and all(_adds_to_pending(reader, user, types) for reader in user.users)
            else self.least[user]
            for user in value.users
        )  # fmt: skip

    @cached_property
    def least(self) -> dict[fx.Node, float]:
        """How many elements of a value are reduced at least, if it is pending.

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
                free = node in self.additions_to_sums or node.target is OVER_STAGES  # reduced over the stages, too
                least[node] = 0 if free else min(_size(node), later)
        return least

    def passes_on(self, user: fx.Node, value: fx.Node) -> bool:
        """Return whether a pending value passes through a reader.

        Terms of a loss, which are scalars, pass: they are added first and reduced once.
        """
        return (
            user in self.additions_to_sums
            or _passes_all(user, value)
            or (user.target in ADDITIONS and _size(user) == 1)
        )


def _adds_to_pending(user: fx.Node, node: fx.Node, types: Mapping[fx.Node, ValueType]) -> bool:
    if user.target not in ADDITIONS:
        return False
    others = [types.get(value) for value in operands(user) if value is not node]
    return all(isinstance(type, TensorType) and bool(type.attr.pending) for type in others)


def _passes_all(user: fx.Node, value: fx.Node) -> bool:
    return all(_passes(user, k) for k, operand in enumerate(operands(user)) if operand is value)


def _passes(node: fx.Node, position: int) -> bool:
    """Return whether a sum passes through an op by this operand alone, and the result has no more elements."""
    if node.op != "call_function" or node.target not in RULES:
        return False
    try:
        bound = bind_node(node)
    except RuleError:  # raised again when the op is placed, with its line
        return False
    if (position,) not in bound.linear or bound.result_shapes[0] is None or len(bound.result_shapes) > 1:
        return False
    return math.prod(bound.result_shapes[0]) <= math.prod(bound.operand_shapes[position])


def _size(node: fx.Node) -> float:
    type = record_of(node).type
    return math.prod(type.shape) if isinstance(type, TensorType) else math.inf


# -- pending reads -----------------------------------------------------------------------------------------------------
#
# Choose the layout in which all readers read a pending value, so that it is reduced once.


# reader → what it would require of its operands now; ``None`` for the output, elements, and ops whose operands are not
# all placed
NeedsOf = Callable[[fx.Node], Sequence[Requirement | None] | None]


def common_layout(
    node: fx.Node, type: TensorType, made_from: Sequence[tuple[ValueType, Requirement | None]], needs_of: NeedsOf
) -> Layout | None:
    """Return the layout in which all readers read a pending value; ``None``: each reads it as it needs it.

    It is reduced to the split of an operand of its shape that was gathered for its op (so the gradient of keys is
    split as the keys were), or to the split that one reader needs, if all readers need it reduced. Else, if one
    reader needs it reduced with its splits unchanged, all read it so, because then it need not be kept in both
    forms.

    Args:
        type: its type, with a pending Layout.
        made_from: the operands of its op, each as it is read and as the op requires it.
    """
    split = _gathered_alike(type, made_from) or _needed_split(node, type, needs_of)
    if (
        split is None
        and len(node.users) > 1
        and any(_needs_reduced(node, type, needs_of(user), user) for user in node.users)
    ):
        split = layout_of(type.mesh, type.attr.without_pending())
    return split


def _gathered_alike(type: TensorType, made_from: Sequence[tuple[ValueType, Requirement | None]]) -> Layout | None:
    pending = {axis for axis, _ in type.attr.pending}
    for home, need in made_from:
        if need is not None and isinstance(home, TensorType) and home.shape == type.shape and not home.attr.pending:
            given_up = pending.intersection(home.attr.axes) - set(need.placed.attr.axes)
            if given_up == pending and type.attr.without_pending() == need.placed.attr:
                return home.layout
    return None


def _needed_split(node: fx.Node, type: TensorType, needs_of: NeedsOf) -> Layout | None:
    split = None
    for user in node.users:
        needs = needs_of(user)
        if needs is None:
            return None
        for value, need in zip(operands(user), needs, strict=True):
            if value is node and need is not None:
                if set(need.placed.attr.pending) & set(type.attr.pending):
                    return None
                if any(place_of(axis, need.placed.attr) for axis, _ in type.attr.pending):
                    split = split or need.layout
    return split


def _needs_reduced(node: fx.Node, type: TensorType, needs: Sequence[Requirement | None] | None, user: fx.Node) -> bool:
    """Return whether a reader needs a pending value reduced, with its splits unchanged."""
    whole = type.attr.without_pending()
    return needs is not None and any(
        value is node and need is not None and need.placed.attr == whole
        for value, need in zip(operands(user), needs, strict=True)
    )


# -- propagation -------------------------------------------------------------------------------------------------------


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
    """Propagates layouts in one walk over a traced program, within the conditions of ``Boundary``.

    Attributes:
        types: node → the type of its result, with a Layout.
        uses: node → the Layouts and dtypes that it requires of its operands.
        split: with ``expanding``, ops that would be split along a factor that they need whole → the split of that dim.
    """

    def __init__(self, program: Program, wanted: PropagationOptions, *, expanding: bool = False) -> None:
        self.program, self.mesh = program, wanted.mesh
        self.strict, self.expanding, self.machine = wanted.strict, expanding, wanted.machine
        self.boundary = Boundary(program, wanted.mesh, wanted.constraints, wanted.whole)
        self.sums = PendingSums(program, self.boundary.additions_to_sums)
        self.drawn_alike = drawn_alike(program.nodes)
        self.split: dict[fx.Node, Dim] = {}
        self.types: dict[fx.Node, ValueType] = {}
        self.read_types: dict[fx.Node, TensorType] = {}  # value → the type that all its readers read, if it is another
        self.data_axes: set[str] = set()  # axes that split an input
        self.uses: dict[fx.Node, tuple[Requirement | None, ...]] = {}
        self.aims: dict[fx.Node, Aim] = {}

    def run(self) -> None:
        forward = True
        for node in self.program.nodes:
            record = record_of(node)
            if forward and (node.op == "output" or (node.op == "call_function" and record.phase != "forward")):
                forward = False
                self.begin_backward()
            if node in self.boundary.tangents or node in self.boundary.open_sums:
                continue  # a tangent is placed before the backward, a sum with its first addend
            if node.op == "output":
                self.types[node] = None
                self.uses[node] = self.edges(node, record)
            elif node.op == "placeholder" or node.op == "get_attr":
                self.place_input(node, record)
            else:
                self.place_op(node, record)

    def place_input(self, node: fx.Node, record: Record) -> None:
        home = self.boundary.home(node)
        self.types[node] = self.on_mesh(tensor_type(node), home.kept)
        if home.read != home.kept:
            self.read_types[node] = self.on_mesh(tensor_type(node), home.read)
        if record.role == "input":
            self.data_axes.update(home.kept.axes)

    def place_op(self, node: fx.Node, record: Record) -> None:
        self.follow_gradient(node)
        if (attr := self.boundary.decided(node)) is not None:
            self.aims[node] = Aim(attr)
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
        type = self.types[node]
        if isinstance(type, TensorType):
            self.set_read_type(node, type)

    def follow_gradient(self, node: fx.Node) -> None:
        """Give a sum of gradients the layout of its parameter."""
        for sum in operands(node):
            if sum in self.boundary.open_sums and sum not in self.types:
                parameter, type = self.boundary.open_sums[sum], tensor_type(sum)
                home = None if parameter is None else self.types[parameter]
                replicated = DistAttr.replicated(len(type.shape))
                attr = sum_home(
                    self.tensor(addend_of(sum, node)).attr, home.attr if isinstance(home, TensorType) else replicated
                )
                self.types[sum] = self.on_mesh(type, attr)

    def set_read_type(self, node: fx.Node, type: TensorType) -> None:
        """Choose the layout in which all readers read a value.

        It is that of the value's constraint; a pending value without one may be reduced for all readers. The transfers
        follow from that.
        """
        attr = self.boundary.read_attr(node, type)
        if attr is not None:
            self.read_types[node] = self.on_mesh(type, attr)
        elif type.attr.pending:
            op = element_of(node)[0] if is_getitem(node) else node
            made_from = [(self.read(value), need) for value, need in zip(operands(op), self.uses[op], strict=True)]
            layout = common_layout(node, type, made_from, self.needs_of)
            if layout is not None:
                self.read_types[node] = replace(type, layout=layout)

    def needs_of(self, reader: fx.Node) -> Sequence[Requirement | None] | None:
        """Return what a reader would require of its operands; ``None`` if they are not all placed yet."""
        placed = all(value in self.types for value in operands(reader))
        if reader.op == "output" or is_getitem(reader) or not placed:
            return None
        return self.choose(reader, record_of(reader))[1]

    def read(self, node: fx.Node) -> ValueType:
        return self.read_types.get(node) or self.types[node]

    def tensor(self, node: fx.Node) -> TensorType:
        """Return the type of an operand, which is one tensor, as its readers read it."""
        type = self.read(node)
        assert isinstance(type, TensorType)
        return type

    def begin_backward(self) -> None:
        """Place the tangents, and aim the gradients at their parameters' layouts."""
        for tangent, value in self.boundary.tangents.items():
            type = self.tensor(value)
            self.types[tangent] = self.on_mesh(type, self.boundary.returned_attr(type))
        axes = frozenset(self.mesh.names) - (self.data_axes - {EXPERTS})
        self.aims |= gradient_aims(self.program, self.types, axes, self.mesh)

    def edges(self, node: fx.Node, record: Record) -> tuple[Requirement | None, ...]:
        """Return what the program requires of its results."""
        types = {value: self.types[value] for value in self.program.placeholders if value in self.types}
        homes = {value.name: type.attr for value, type in types.items() if isinstance(type, TensorType)}
        values = [self.tensor(value) for value in operands(node)]
        dtypes = required_dtypes(record, values)
        return tuple(
            requirement_of(self.mesh, self.boundary.result_attr(result, value, homes), dtype)
            for value, result, dtype in zip(values, record.results, dtypes, strict=True)
        )

    def choose(self, node: fx.Node, record: Record) -> tuple[ValueType, tuple[Requirement | None, ...]]:
        bound = usable_rule(node, strict=self.strict)
        operand_nodes, of_parameters = operands(node), self.boundary.of_parameters
        values = [self.tensor(value) for value in operand_nodes]
        data = frozenset(self.data_axes)
        pairs = zip(operand_nodes, values, strict=True)
        if any(operand in of_parameters and EXPERTS in value.attr.axes for operand, value in pairs):
            data -= {EXPERTS}
        others = frozenset(self.mesh.names) - data
        staying = tuple(others if value in of_parameters else data for value in operand_nodes)
        required = required_dtypes(record, values)
        homes = tuple(attr_before_cast(value, dtype) for value, dtype in zip(values, required, strict=True))
        dtypes = tuple(value.dtype for value in values)
        waits = self.sums.passing_operands(node, homes, self.types)
        if node in self.drawn_alike:
            needs, gives = bound.place(self.strategy_like(self.drawn_alike[node], bound), self.mesh)
        else:
            needs, gives = cheapest(bound, homes, dtypes, staying, self.mesh, self.aims.get(node), self.opened(node),
                                    waits, self.machine)  # fmt: skip
        uses = tuple(requirement_of(self.mesh, a, dtype) for a, dtype in zip(needs, required, strict=True))
        return self.with_layouts(record.type, gives), uses

    def strategy_like(self, other: fx.Node, bound: Bound) -> Strategy:
        """Return the strategy that splits an op as the one that draws the same random numbers."""
        type, of_other = self.types[other], bind_node(other)
        needs = [use.placed.attr for use in self.uses[other] if use is not None]
        gives = [None if part is None else part.attr for part in (type if isinstance(type, tuple) else (type,))]
        return Strategy(splits_in_common(of_other, of_other.splits(needs, gives, self.mesh), bound, self.mesh))

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
            None if part is None or attr is None else self.on_mesh(part, attr)
            for part, attr in zip(type if isinstance(type, tuple) else (type,), attrs, strict=True)
        )
        return placed if isinstance(type, tuple) else placed[0]

    def on_mesh(self, type: TensorType, attr: DistAttr) -> TensorType:
        return replace(type, layout=layout_of(self.mesh, attr))
