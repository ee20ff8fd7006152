"""Propagate layouts: from a few constraints to a Layout for every value and every use, greedily, in graph order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.capture.decompose.expansions import opened_factors
from autopar.costs.machine import Machine
from autopar.ir.layout import Dim, DistAttr, layout_of
from autopar.ir.mesh import EXPERTS, Mesh
from autopar.ir.nodes import element_of, is_getitem, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, TensorType, ValueType, requirement_of
from autopar.plan.boundary import Boundary, addend_of, attr_before_cast, required_dtypes, sum_home
from autopar.plan.choice import Aim, Opened, cheapest
from autopar.plan.gradient_aims import gradient_aims
from autopar.plan.pending_reads import common_layout
from autopar.plan.pending_sums import PendingSums
from autopar.plan.usable_rules import usable_rule
from autopar.rules.binding import bind_node
from autopar.rules.drawn import drawn_alike, splits_in_common
from autopar.rules.strategies import Bound, Strategy, axes_of


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
