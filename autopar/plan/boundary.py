"""Give the boundary conditions of layouts: what a traced program and its constraints decide before any op is placed.

Whoever chooses strategies for the ops, greedily or by a search, keeps these conditions:

====================  =================================================================================================
placeholders          a constraint, or a Layout of the traced program, is the home, and its dims with ``?`` are open in
                      a search; parameters and states are kept only in what DTensor can express
sums of gradients     internal to the step: the home follows from the gradient and from the parameter's home
tangents              as the returned value that they belong to
results of ops        readers of a constrained result read it in the layout of the constraint
operands              in the dtype that the traced program requires; a value that is narrowed is reduced first
results of programs   returned values reduced, and in what DTensor can express, or whole; gradients and states in the
                      home of their placeholder
====================  =================================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from autopar.ir.dtensor import edge_of
from autopar.ir.layout import UNDECIDED, Dim, DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Record, Result, TensorType
from autopar.ir.value_names import LOSS, gradient_parameter
from autopar.torch_private import aten

OPEN: Dim = ((None, (UNDECIDED,)),)  # a dim that a constraint leaves open
ADDITIONS = {aten.add.Tensor, aten.sub.Tensor}


class UserConstraints(dict[str, DistAttr]):
    """Node → DistAttr; dims with ``?`` are free.

    Attributes:
        names: node → the user's name of it, for errors: ``up.weight``, ``down()``.
    """

    def __init__(self, attrs: Mapping[str, DistAttr], names: Mapping[str, str]) -> None:
        super().__init__(attrs)
        self.names = names


@dataclass(frozen=True)
class Home:
    """The attributes of a placeholder.

    Attributes:
        kept: the attribute in which it is given, and kept between steps.
        read: the attribute in which its readers read it.
    """

    kept: DistAttr
    read: DistAttr


@dataclass(frozen=True, eq=False)
class Boundary:
    """The boundary conditions of a traced program.

    Attributes:
        program: the program, which does not change meanwhile.
        mesh: the mesh.
        constraints: node → DistAttr; dims with ``?`` are free.
        whole: whether returned values are gathered.
    """

    program: Program
    mesh: Mesh
    constraints: Mapping[str, DistAttr] = field(default_factory=dict)
    whole: bool = False

    def decided(self, node: fx.Node) -> DistAttr | None:
        """Return the attribute that a constraint, or else a Layout of the traced program, gives a value.

        It is as written, not normalized. ``None``: nothing is decided.
        """
        type = record_of(node).type
        layout = type.layout if isinstance(type, TensorType) else None
        return self.constraints.get(node.name, None if layout is None else layout.attr)

    def said(self, node: fx.Node) -> str:
        """Return the user's name of a constrained value."""
        names = self.constraints.names if isinstance(self.constraints, UserConstraints) else {}
        return names.get(node.name, name_of(node) if node.op == "placeholder" else node.name)

    @property
    def constrained(self) -> bool:
        """Whether the user has given layouts: in a plan, in forward, by DTensors, or by pieces of a batch."""
        return isinstance(self.constraints, UserConstraints) and bool(self.constraints.names)

    # -- placeholders --------------------------------------------------------------------------------------------

    def home(self, node: fx.Node) -> Home:
        """Return the home of a placeholder or a constant for which nothing is chosen: replicated, if not decided.

        Not for ``tangents`` and ``open_sums``, whose homes follow from other values.
        """
        type, decided = tensor_type(node), self.decided(node)
        read = (DistAttr.replicated(len(type.shape)) if decided is None else decided).normalize(type.shape, self.mesh)
        if node in self.sums and type.layout is not None:
            return Home(type.attr.normalize(type.shape, self.mesh), read)
        return Home(self.nearest_home(node, read), read)

    def nearest_home(self, node: fx.Node, attr: DistAttr) -> DistAttr:
        """Return the attribute nearest to ``attr`` in which a placeholder can be kept.

        A placeholder can be kept in exactly those attributes that are their own nearest ones. Parameters, buffers,
        states and constants are kept in what DTensor can express. Inputs may come in any attribute, and sums of
        gradients may be kept in any, because no user sees them.
        """
        if record_of(node).role == "input" or node in self.sums:
            return attr
        return edge_of(attr, self.mesh, tensor_type(node).shape, strided=True)

    @cached_property
    def sums(self) -> dict[fx.Node, fx.Node | None]:
        """Sum of gradients → its parameter; see ``gradient_sums``."""
        return gradient_sums(self.program)

    @cached_property
    def open_sums(self) -> dict[fx.Node, fx.Node | None]:
        """Sum of gradients whose home is not decided → its parameter; ``sum_home`` gives the home."""
        return {sum: parameter for sum, parameter in self.sums.items() if self.decided(sum) is None}

    @cached_property
    def additions_to_sums(self) -> frozenset[fx.Node]:
        """The ops that add to ``open_sums``. What they add may stay pending there."""
        return frozenset(user for sum in self.open_sums for user in sum.users if user.target in ADDITIONS)

    @cached_property
    def tangents(self) -> dict[fx.Node, fx.Node]:
        """Tangent → the returned value that it belongs to."""
        output = self.program.output
        results = zip(operands(output), record_of(output).results, strict=True)
        returned = [value for value, result in results if result.kind == "return"]
        tangents = {}
        for node in self.program.placeholders:
            record = record_of(node)
            if record.role == "tangent":
                assert record.index is not None
                tangents[node] = returned[record.index]
        return tangents

    @cached_property
    def of_parameters(self) -> frozenset[fx.Node]:
        """Parameters, buffers, states, seeds and constants, and the values that are computed from these alone."""
        found: set[fx.Node] = set()
        for node in self.program.nodes:
            if node.op in ("placeholder", "get_attr"):
                if record_of(node).role not in ("input", "tangent"):
                    found.add(node)
            elif node.op == "call_function" and (values := operands(node)) and found.issuperset(values):
                found.add(node)
        return frozenset(found)

    def homes(self, node: fx.Node, options: Sequence[DistAttr]) -> list[DistAttr]:
        """Return the homes that a placeholder may have: of ``options``, those that agree with what is decided.

        A decided dim is as decided, so the axes that split it are taken.
        """
        decided = None if node in self.tangents else self.decided(node)
        if decided is None:
            # buffers and constants are plain tensors, whole on every rank
            whole = node.op == "get_attr" or (record_of(node).role == "buffer" and node not in self.sums)
            return [self.home(node).kept] if whole else [*options, *self._pending(node, options)]
        if OPEN not in decided.dims:
            return [self.home(node).kept]
        shape = tensor_type(node).shape
        filled_in = (filled(decided, attr).normalize(shape, self.mesh) for attr in options)
        return [*dict.fromkeys(self.nearest_home(node, attr) for attr in filled_in)]

    def _pending(self, node: fx.Node, options: Sequence[DistAttr]) -> list[DistAttr]:
        """Return the homes in which a sum of gradients is pending: over any of the axes that do not split it."""
        if node not in self.open_sums:
            return []
        axes = [axis for axis in self.mesh.names if self.mesh.sizes[axis] > 1]
        return [
            replace(attr, pending=tuple((axis, "sum") for axis in sorted(chosen)))
            for attr in options
            for count in range(1, len(axes) + 1)
            for chosen in itertools.combinations(axes, count)
            if not set(chosen).intersection(attr.axes)
        ]

    # -- results -------------------------------------------------------------------------------------------------

    def read_attr(self, node: fx.Node, type: TensorType) -> DistAttr | None:
        """Return the attribute in which all readers read a constrained result; ``None``: it has no constraint.

        Args:
            type: the type of the result, with the Layout that its op gives it: open dims are as there.
        """
        decided = self.decided(node)
        return None if decided is None else filled(decided, type.attr).normalize(type.shape, self.mesh)

    def returned_attr(self, type: TensorType) -> DistAttr:
        """Return the attribute in which a value is returned, given the type that readers read.

        Its tangent comes in the same attribute.
        """
        return DistAttr.replicated(len(type.shape)) if self.whole else edge_of(type.attr, self.mesh, type.shape)

    def result_attr(self, result: Result, type: TensorType, homes: Mapping[str, DistAttr]) -> DistAttr:
        """Return the attribute in which the program gives a result.

        Args:
            type: of the value, as readers read it.
            homes: placeholder → the attribute in which it is kept.
        """
        home = homes.get(result.of)
        return self.returned_attr(type) if home is None else home


def gradient_sums(program: Program) -> dict[fx.Node, fx.Node | None]:
    """Return the states in which gradients of parameters add up → the parameter, and those of losses.

    Examples: ``up.weight.grad`` → ``up.weight``, and ``.loss``.
    """
    named = {name_of(node): node for node in program.placeholders}
    sums: dict[fx.Node, fx.Node | None] = {}
    for node in program.placeholders:  # several stages may add up the gradients of one parameter
        name = name_of(node)
        parameter = gradient_parameter(name) or ""
        type = record_of(node).type
        # of a parameter that an update only measures
        waits = isinstance(type, TensorType) and type.layout is not None and bool(type.layout.attr.pending)
        if record_of(node).role in ("state", "buffer") and (
            (parameter and (parameter in named or waits)) or name == LOSS
        ):
            sums[node] = named.get(parameter)
    return sums


def addend_of(sum: fx.Node, addition: fx.Node) -> fx.Node:
    """Return what an op adds to a sum of gradients."""
    (addend,) = (value for value in operands(addition) if value is not sum)
    return addend


def sum_home(addend: DistAttr, parameter: DistAttr) -> DistAttr:
    """Return the home of a sum of gradients: the splits of its parameter's home.

    It is pending over axes over which the gradient is pending and the parameter not split.

    Args:
        addend: the attribute of the first gradient that is added, as the addition reads it.
        parameter: the home of the parameter; of a sum of losses, replicated.
    """
    split_axes = {axis for dim in parameter.dims for _, axes in dim for axis in axes}
    return DistAttr(parameter.dims, tuple((axis, kind) for axis, kind in addend.pending if axis not in split_axes))


def filled(constraint: DistAttr, attr: DistAttr) -> DistAttr:
    """Return a constraint with its open dims taken from ``attr``, and with no pending axes."""
    taken = set(constraint.axes)
    dims = [
        tuple((size, tuple(a for a in axes if a not in taken)) for size, axes in parts) if wanted == OPEN else wanted
        for wanted, parts in zip(constraint.dims, attr.dims, strict=True)
    ]
    return DistAttr(tuple(dims))


def agreed(one: DistAttr, other: DistAttr) -> DistAttr | None:
    """Return the constraint that says what two constraints of one value say; ``None`` if they contradict each other."""
    dims = tuple(b if a == OPEN else a for a, b in zip(one.dims, other.dims, strict=True))
    if any(OPEN != b != a for a, b in zip(dims, other.dims, strict=True)):
        return None
    axes = [axis for dim in dims if dim != OPEN for _, axes in dim for axis in axes]
    return DistAttr(dims) if len(set(axes)) == len(axes) else None


def required_dtypes(record: Record, values: Sequence[TensorType]) -> tuple[torch.dtype, ...]:
    """Return the dtype in which each operand is used: as the traced program requires, or else its own."""
    needs = record.uses or (None,) * len(values)
    return tuple(value.dtype if need is None else need.dtype for value, need in zip(values, needs, strict=True))


def rounds_nothing(type: TensorType, dtype: torch.dtype) -> bool:
    """Return whether a value can be cast while it is pending; a value that is narrowed must be reduced first."""
    return type.dtype == dtype or torch.promote_types(type.dtype, dtype) == dtype


def attr_before_cast(type: TensorType, dtype: torch.dtype) -> DistAttr:
    """Return the attribute that an operand can have when it is cast to ``dtype``: reduced if the cast narrows it."""
    return type.attr if rounds_nothing(type, dtype) else type.attr.without_pending()
