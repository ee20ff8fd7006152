"""Trace a call on fake tensors whose batch and other lengths are symbols.

The graph is that of a trace with numbers, op by op: nodes that only compute sizes are removed, and their values become
sizes of the program (``autopar.ir.sizes``). What Python or torch decides by a size is a condition, which later calls
must meet.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from autopar.capture.arguments import Arguments
from autopar.capture.provenance import Origin, user_line
from autopar.capture.symbolic.validity import SizeGuard, Validity, condition_text
from autopar.capture.trace import Tracer
from autopar.errors import CaptureError
from autopar.ir.nodes import map_operands, node_at
from autopar.ir.ops.seeded_random import Draw, Like, Random
from autopar.ir.sizes import Size, Values, map_sizes, sized, symbol
from autopar.ir.text.tokens import can_name
from autopar.torch_private import (
    FakeTensorMode,
    FloorDiv,
    OpOverload,
    PythonMod,
    SymbolicSizes,
    aten,
    enable_python_dispatcher,
    products_of_symbols,
    size_expression,
    size_hint,
)

SLICE = aten.slice.Tensor
SLICE_BACKWARD = aten.slice_backward.default
CONVOLUTION = aten.convolution.default
CONVOLUTIONS = frozenset({CONVOLUTION, aten.convolution_backward.default})
# what a size may consist of: all else has no text
PARTS = (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul, sympy.Pow, FloorDiv, PythonMod, sympy.Max, sympy.Min)


class NoSymbolsError(CaptureError):
    """The step has numbers that follow from sizes in a way that a program cannot say."""


class SymbolicTracer(Tracer):
    """A trace with symbols for the lengths of inputs.

    The batch is dim 0 of each input whose dim 0 is that of the first; it is one symbol. Other dims of equal length,
    of several inputs, are one symbol; dims of one input are not. Lengths 0 and 1 are numbers.
    """

    def __init__(
        self, model: torch.nn.Module, arguments: Arguments, random: Random = "parallel", keep: bool = False
    ) -> None:
        super().__init__(model, arguments, random, keep=keep)
        self.symbols = SymbolicSizes(self._line)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self.symbols)
        self.recorder.kernels = self._kernels
        self._sizes: dict[Any, torch.SymInt] = {}
        self._asked = 0  # how many fake tensors have been made
        self._inputs: list[torch.Tensor] = []
        self._places: dict[Any, tuple[str, int]] = {}  # symbol of torch's → the dim that it was made for

    @contextlib.contextmanager
    def _kernels(self, op: Any, args: Sequence[Any]) -> Iterator[None]:
        """Run an op with kernels that take symbols: some of torch's in C++ make numbers of them.

        A convolution chooses its kernel by the batch. That is no condition on the program; that shapes fit is one.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(enable_python_dispatcher())
            if op is CONVOLUTION:
                _check_convolution(*args)
            if op in CONVOLUTIONS:
                stack.enter_context(self.symbols.suppress_guards())
            yield

    @contextlib.contextmanager
    def _on_stand_ins(self, tensors: Sequence[torch.Tensor], seed: torch.Tensor) -> Iterator[None]:
        with products_of_symbols(), super()._on_stand_ins(tensors, seed):
            yield

    def _probe(self, fakes: Sequence[torch.Tensor], seed: torch.Tensor) -> list[torch.Tensor]:
        with self.unroller:  # torch's own kernels of recurrent layers make numbers of symbols
            tangents = super()._probe(fakes, seed)
        self.unroller.steps.clear()
        return tangents

    def _line(self) -> str:
        return self.recorder.current.source if self.recorder.phase == "backward" else user_line()

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        position = self._asked - len(self.parameters) - len(self.buffers)
        self._asked += 1
        if not 0 <= position < len(self.arguments.tensors):
            return super()._fake(tensor)
        device = self.device if tensor.is_meta else tensor.device
        shape, order = self._shape(position), _memory_order(tensor)
        with self.mode:
            fake = torch.empty([shape[d] for d in order], dtype=tensor.dtype, device=device)
            fake = fake.permute([order.index(d) for d in range(len(order))]) if order else fake
        fake = fake.detach().requires_grad_(tensor.requires_grad and self.grad)
        self._inputs.append(fake)
        return fake

    def _shape(self, position: int) -> list[Any]:
        """Return the shape of an input, with symbols in the place of lengths."""
        name, tensor = self.arguments.names[position], self.arguments.tensors[position]
        first = next((t for t in self.arguments.tensors if t.dim()), tensor)
        seen: collections.Counter[int] = collections.Counter()
        shape: list[Any] = []
        for d, length in enumerate(map(int, tensor.shape)):
            batch = d == 0 and length == first.shape[0]
            key = "batch" if batch else (length, seen[length])
            seen[length] += not batch
            if length < 2:
                shape.append(length)
                continue
            if key not in self._sizes:
                self._sizes[key] = self.symbols.new(f"{name}.{d}", length)
                self._places[size_expression(self._sizes[key])] = (name, d)
            shape.append(self._sizes[key])
        return shape

    # -- the graph -----------------------------------------------------------------------------------------------------

    def settled(self) -> dict[fx.Node, fx.Node]:
        graph, computed = self.module.graph, []
        replaced: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if _is_number(node):
                computed.append(node)
                continue
            if any(_is_number(operand) for operand in node.all_input_nodes):
                line = self.recorder.origins.get(node, Origin()).source
                number = functools.partial(self._number, line)
                node.args, node.kwargs = map_operands(node.args, number), map_operands(dict(node.kwargs), number)
            if _is_identity(node):
                replaced[node] = node_at(node)
                node.replace_all_uses_with(node_at(node))
        _number_names({*computed, *replaced}, graph)
        for node in reversed(computed):
            if not node.users:
                graph.erase_node(node)
        return replaced

    def _number(self, line: str, node: fx.Node) -> Any:
        """Return the size that a node computes; other nodes as they are. ``line``: the user's, which reads it."""
        if not _is_number(node):
            return node
        value = node.meta["val"]
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            of = sorted(self._places[part] for part in size_expression(value).free_symbols if part in self._places)
            sizes = ", ".join(f"dim {d} of {name}" for name, d in of) or "a size"
            raise NoSymbolsError(f"a number that is no integer follows from {sizes}\n    {line or 'no line is known'}")
        return value

    # -- sizes of the program ------------------------------------------------------------------------------------------

    @property
    def names(self) -> dict[Any, sympy.Symbol]:
        """Torch's symbol → ours, in the order of inputs; those that are known to be equal to others have none."""
        found: dict[Any, sympy.Symbol] = {}
        for fake in self._inputs:
            for size in fake.shape:
                expression = size_expression(size)
                if isinstance(expression, sympy.Symbol) and expression not in found:
                    found[expression] = symbol(f"s{len(found)}")
        return found

    @property
    def values(self) -> Values:
        hints = {
            size_expression(size): size_hint(size) for size in self._sizes.values() if isinstance(size, torch.SymInt)
        }
        return {ours: hints[theirs] for theirs, ours in self.names.items()}

    def size(self, value: Any) -> int:
        if not isinstance(value, torch.SymInt):
            return int(value)
        if not hasattr(self, "_named"):  # no condition is decided any more
            self._named, self._values = self.names, self.values
        expression = sympy.sympify(size_expression(value))
        if not all(isinstance(part, PARTS) for part in sympy.preorder_traversal(expression)):
            raise NoSymbolsError(f"a size has no text: {expression}")
        return sized(size_hint(value), sympy.expand(expression.xreplace(self._named)), self._values)

    def name_sizes(self, graph: fx.Graph) -> None:
        def named(value: Any) -> Any:
            return self.size(value) if isinstance(value, torch.SymInt) else value

        def like(value: Any) -> Any:
            return Like(tuple(map(named, value.shape)), value.dtype) if isinstance(value, Like) else named(value)

        for node in graph.nodes:
            if node.op == "call_function":
                node.args, node.kwargs = map_sizes(node.args, named), map_sizes(dict(node.kwargs), named)
        self.draws = tuple(
            Draw(draw.op, map_sizes(draw.args, like), map_sizes(draw.kwargs, like), draw.order) for draw in self.draws
        )

    def validity(self) -> Validity:
        """Return which sizes the program serves."""
        names = {**self.names}
        equal = {theirs: sympy.sympify(self.symbols.replace(theirs)) for theirs in self._places}
        shapes = {
            name: tuple(map(self.size, fake.shape))
            for name, fake in zip(self.arguments.names, self._inputs, strict=True)
        }
        guards: dict[str, SizeGuard] = {}
        lines: dict[Any, str] = {}  # a symbol that is a number → the line that needs it
        for condition, source in self.symbols.conditions:
            for each in condition.free_symbols:
                if equal.get(each, each).is_number:
                    lines.setdefault(each, source)
            now = condition.xreplace(equal).xreplace(names)
            if now == sympy.true:
                continue
            text = condition_text(now)
            guards.setdefault(text, SizeGuard(text, source, now))
        validity = Validity(shapes, tuple(guards.values()))
        for name, shape in shapes.items():
            for d, size in enumerate(shape):
                if not isinstance(size, Size):
                    validity.fixed[name, d] = SizeGuard(f"dim {d} of {name} is {size}", self._line_of(name, d, lines))
        return validity

    def _line_of(self, name: str, d: int, lines: dict[Any, str]) -> str:
        """Return the line that needs a length to be a number."""
        position = self.arguments.names.index(name)
        made = self._shape(position)[d]
        theirs = made if isinstance(made, int) else made.node._expr
        return lines.get(theirs, "")


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list, type(None)))


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two shapes are equal for all values of symbols; no condition is decided."""
    return [size_expression(size) for size in one] == [size_expression(size) for size in other]


def _is_identity(node: fx.Node) -> bool:
    """Return whether a slice takes all of a dim: with numbers, torch records none."""
    if node.target not in (SLICE, SLICE_BACKWARD):
        return False
    return _same(node.meta["val"].shape, node_at(node).meta["val"].shape)


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims of a tensor in memory order; their own order where its memory has gaps."""
    strides, expected = tensor.stride(), 1
    order = sorted(range(tensor.dim()), key=lambda d: -strides[d])
    for d in reversed(order):
        if tensor.shape[d] != 1 and strides[d] != expected:
            return list(range(tensor.dim()))
        expected *= tensor.shape[d]
    return order


def _check_convolution(
    x: Any, weight: Any, bias: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> None:  # fmt: skip
    """Decide the conditions under which a convolution accepts its input: channels, and windows that fit."""
    extra = x.dim() - weight.dim()
    channels = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1 + extra] != channels:
        return  # torch has the error
    for k, length in enumerate(x.shape[2 + extra :]):
        window = dilation[k % len(dilation)] * (weight.shape[2 + k] - 1) + 1
        if not transposed and length + 2 * padding[k % len(padding)] < window:
            return


def _number_names(gone: Collection[fx.Node], graph: fx.Graph) -> None:
    """Name the ops as if nothing had been made that only computes sizes: ``add_2`` is ``add`` if it is the first."""
    for node in gone:
        node.name = f"{node.name}_size"
    made: dict[str, list[tuple[int, fx.Node]]] = collections.defaultdict(list)
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node not in gone:
            base, number = _numbered(node.name)
            made[base].append((number, node))
    for base, nodes in made.items():
        for number, (_, node) in enumerate(sorted(nodes, key=lambda each: each[0]), not can_name(base)):
            node.name = f"{base}_{number}" if number else base


def _numbered(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*)_(\d+)", name)
    return (match[1], int(match[2])) if match else (name, 0)
