"""Find the sizes of a program's values as expressions in the batch and the sequence.

A call is captured at further sizes: twice and three times each symbol. Where all captures have the same ops, each dim
is a polynomial that is affine in each symbol; the captures at once and twice the sizes determine it, and the one at
three times the sizes must agree. What agrees nowhere is refused, and nothing is guessed from equal numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from autopar.capture.decompose.expanded import ARANGE
from autopar.costs.symbolic import NoExpression, OpSizes, Size, Sizes
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, name_of, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType, ValueType
from autopar.ir.value_names import input_of_batch
from autopar.rules.binding import bind_node
from autopar.rules.strategies import Bound
from autopar.search.symbols.index_sizes import size_of_places

Shapes = Mapping[str, Sequence[int]]  # input → shape
Marks = Mapping[str, Sequence[str | None]]  # input → the symbol of each dim, or ``None`` for a fixed one

UNCERTAIN = "a pass has made this op, and the sizes of its dims do not follow from its rule"


@dataclass(frozen=True)
class Captures:
    """A traced program at several sizes.

    Attributes:
        symbols: name → symbol.
        base: name → size at the first capture.
        factors: how often each symbol's size is that of the first capture, for each capture.
        programs: the captures; the last one is the check.
    """

    symbols: Mapping[str, sympy.Symbol]
    base: Mapping[str, int]
    factors: tuple[tuple[int, ...], ...]
    programs: tuple[Program, ...]

    def fitted(self, sizes: Sequence[int]) -> Size:
        """Return the expression of a size that has these values in the captures.

        Raises:
            NoExpression: it is not affine in each symbol.
        """
        if len(set(sizes)) == 1:
            return sympy.Integer(sizes[0])
        at = dict(zip(self.factors, sizes, strict=True))
        names, total, check = [*self.symbols], sympy.Integer(0), 0
        for chosen in itertools.product((False, True), repeat=len(names)):
            positions = [k for k, each in enumerate(chosen) if each]
            coefficient = 0
            for subset in _subsets(positions):
                point = tuple(2 if k in subset else 1 for k in range(len(names)))
                coefficient += (-1) ** (len(positions) - len(subset)) * at[point]
            check += coefficient * 2 ** len(positions)
            total += coefficient * sympy.Mul(*(self.symbols[names[k]] / self.base[names[k]] - 1 for k in positions))
        if check != sizes[-1]:
            raise NoExpression(f"its sizes {', '.join(map(str, sizes))} are not affine in {' and '.join(names)}")
        return sympy.expand(total)


def _subsets(positions: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(positions) + 1):
        yield from itertools.combinations(positions, count)


def captures(shapes: Shapes, marks: Marks, capture: Callable[[Shapes], Program]) -> Captures:
    """Capture a call at the sizes of ``shapes``, and at twice and three times those of each symbol.

    Raises:
        NoExpression: dims of one symbol have different sizes, or there are no symbols.
    """
    base: dict[str, int] = {}
    for name, dims in marks.items():
        for size, symbol in zip(shapes[name], dims, strict=True):
            if symbol is not None and base.setdefault(symbol, size) != size:
                raise NoExpression(f"{symbol} has the sizes {base[symbol]} and {size}, the latter in {name}")
    if not base:
        raise NoExpression("no dim of an input has a symbol")
    factors = (*itertools.product((1, 2), repeat=len(base)), (3,) * len(base))
    programs = []
    for factor in factors:
        by = dict(zip(base, factor, strict=True))
        resized = {
            name: tuple(
                size * by.get(symbol or "", 1)
                for size, symbol in zip(shape, marks.get(name, [None] * len(shape)), strict=True)
            )
            for name, shape in shapes.items()
        }
        try:
            programs.append(capture(resized))
        except Exception as error:  # of the model's own code, too
            sizes = ", ".join(f"{name} {list(shape)}" for name, shape in resized.items())
            why = str(error).partition("\n")[0]
            raise NoExpression(f"the model takes no inputs of the sizes {sizes}: {why}") from error
    symbols = {name: sympy.Symbol(name, positive=True) for name in base}
    return Captures(symbols, base, factors, tuple(programs))


@dataclass
class ProgramSizes:
    """The sizes of the values of an explicit program, from captures of its traced program.

    Values that passes have made have the sizes that their rules give them.
    """

    program: Program
    captures: Captures
    _shapes: dict[fx.Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._traced = [{node.name: node for node in program.nodes} for program in self.captures.programs]
        self._calls = {_call(node, {}): node.name for node in self.captures.programs[0].nodes}
        self._names: dict[fx.Node, str] = {}  # of the captured value that is the same

    def __iter__(self) -> Iterator[tuple[fx.Node, Bound | None, Any]]:
        """Yield each op with its rule and ``OpSizes``, and each transfer with the sizes of its value's dims.

        Raises:
            NoExpression: the sizes of a value are not certain; the text has its line.
        """
        for node in self.program.nodes:
            try:
                yield from self._of(node)
            except NoExpression as error:
                record = record_of(node)
                place = record.source or record.module
                raise NoExpression(f"{node.name}{f' ({place})' * bool(place)}: {error}") from None

    def _of(self, node: fx.Node) -> Iterator[tuple[fx.Node, Bound | None, Any]]:
        if node.op == "output":
            return
        if node.op != "call_function":
            self._shapes[node] = self._of_placeholder(node)
        elif is_getitem(node):
            self._shapes[node] = self._shapes[node.args[0]][node.args[1]]  # type: ignore[index]
            self._names[node] = f"{self._names.get(node.args[0], '')}[{node.args[1]}]"  # type: ignore[arg-type]
        elif node.target in transfers.BY_FUNCTION:
            (operand, *_) = operands(node)
            self._shapes[node] = shape = self._shapes[operand]
            if operand in self._names:
                self._names[node] = self._names[operand]
            yield node, None, shape
        else:
            bound = bind_node(node)
            sizes = self._of_op(node, bound)
            made = iter(sizes.results)
            type = record_of(node).type
            self._shapes[node] = tuple(made) if isinstance(type, tuple) else next(made)
            yield node, bound, sizes

    def _same(self, node: fx.Node) -> list[fx.Node] | None:
        """Return the node in each capture; ``None`` if a pass has made it."""
        by_call = self._calls.get(_call(node, self._names))
        for name in (by_call, node.name):
            nodes = [traced.get(name or "") for traced in self._traced]
            first = nodes[0]
            if first is None or _shapes_of(record_of(first).type) != _shapes_of(record_of(node).type):
                continue
            if not _alike(node, first) or (name != by_call and _place(node) != _place(first)):
                continue
            if any(other is None or not _alike(node, other) for other in nodes):
                raise NoExpression("at other sizes the model runs other ops")
            self._names[node] = first.name
            return nodes  # type: ignore[return-value]
        return None

    def _of_placeholder(self, node: fx.Node) -> Sizes:
        same, type = self._same(node) or self._of_micro_batch(node), record_of(node).type
        assert isinstance(type, TensorType)
        if same is not None:
            return self._fitted([record_of(other).type for other in same])[0]
        if record_of(node).role in ("input", "tangent") and type.shape:
            raise NoExpression("a pass has made this input, so the sizes of its dims are not known")
        return [sympy.Integer(size) for size in type.shape]

    def _of_micro_batch(self, node: fx.Node) -> list[fx.Node] | None:
        """Return the captured input, for an input of a program of all micro-batches, ``labels.0``."""
        if record_of(node).role != "input":
            return None
        name = input_of_batch(name_of(node))
        found = [
            next((each for each in program.placeholders if name_of(each) == name), None)
            for program in self.captures.programs
        ]
        if any(each is None for each in found) or tensor_type(found[0]).shape != tensor_type(node).shape:  # type: ignore[arg-type]
            return None
        self._names[node] = found[0].name  # type: ignore[union-attr]
        return found  # type: ignore[return-value]

    def _of_op(self, node: fx.Node, bound: Bound) -> OpSizes:
        same = self._same(node)
        if same is None:
            return self._by_rule(node, bound)
        bounds = [bind_node(other) for other in same]
        if any((b.operands, b.results) != (bound.operands, bound.results) for b in bounds):
            raise NoExpression(f"its rule is another one at other sizes than {bound.pattern.text}")
        factors = {name: self.captures.fitted([b.sizes[name] for b in bounds]) for name in bound.sizes}
        results = self._fitted([record_of(other).type for other in same])
        return OpSizes(factors, [self._shapes[operand] for operand in operands(node)], results)

    def _by_rule(self, node: fx.Node, bound: Bound) -> OpSizes:
        """Return the sizes of an op that a pass has made: those of its factors in its operands."""
        read = [self._shapes[operand] for operand in operands(node)]
        factors: dict[str, Size] = {}
        if node.target is ARANGE and (count := size_of_places(node, self._traced, self.captures.fitted)) is not None:
            factors = dict.fromkeys(bound.sizes, count)
        for dims, shape in zip(bound.operands, read, strict=True):
            for dim, size in zip(dims, shape, strict=True):
                if len(dim) == 1:
                    if factors.setdefault(dim[0], size) != size:
                        raise NoExpression(UNCERTAIN)
                elif not size.free_symbols:
                    for factor in dim:
                        factors.setdefault(factor, sympy.Integer(bound.sizes[factor]))
        symbolic = not read or any(size.free_symbols for shape in read for size in shape)
        for factor, size in bound.sizes.items():
            if factor not in factors:
                if symbolic and size != 1:
                    raise NoExpression(UNCERTAIN)
                factors[factor] = sympy.Integer(size)
        results: list[Sizes | None] = []
        for made, whole in zip(bound.results, bound.result_shapes, strict=True):
            if made is None or whole is None:
                results.append(None)
                continue
            if symbolic and any(not dim and size != 1 for dim, size in zip(made, whole, strict=True)):
                raise NoExpression(UNCERTAIN)
            results.append([
                sympy.Mul(*(factors[factor] for factor in dim)) if dim else sympy.Integer(size)
                for dim, size in zip(made, whole, strict=True)
            ])  # fmt: skip
        return OpSizes(factors, read, results)

    def _fitted(self, types: Sequence[ValueType]) -> list[Any]:
        """Return the sizes of each part of a value."""
        parts = [type if isinstance(type, tuple) else (type,) for type in types]
        fitted: list[Any] = []
        for same in zip(*parts, strict=True):
            if same[0] is None:
                fitted.append(None)
                continue
            shapes = [part.shape for part in same]
            if len({len(shape) for shape in shapes}) > 1:
                raise NoExpression("at other sizes it has other dims")
            fitted.append([self.captures.fitted(sizes) for sizes in zip(*shapes, strict=True)])
        return fitted


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes are placeholders, or calls of one op."""
    return node.op == other.op and (node.op != "call_function" or node.target == other.target)


def _place(node: fx.Node) -> tuple[str, str, str]:
    record = record_of(node)
    return record.module, record.source, record.phase


def _call(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """Return a call by its op, its constants, and the names of its operands: equal calls give equal values."""
    if node.op != "call_function":
        return node.name

    def named(argument: fx.Node) -> str:
        if is_getitem(argument) and argument not in names:
            return f"{argument.args[0]}[{argument.args[1]}]"
        return names.get(argument, argument.name)

    return f"{node.target} {fx.map_arg((node.args, node.kwargs), named)}"


def _shapes_of(type: ValueType) -> list[tuple[int, ...] | None]:
    return [None if part is None else part.shape for part in (type if isinstance(type, tuple) else (type,))]
