"""Make inputs of numbers: a float that changes again and again becomes an operand of the program.

It must be used in arithmetic only.

    mul : f32[4 8] = mul.Tensor(x, 0.5)        →        beta : f32[] = input('.beta')
                                                        mul : f32[4 8] = mul.Tensor(x, beta)

The step is captured twice: once with the float itself, and once with a ``Tracked`` float of nearly the same value. The
tracked float notes what Python computes from it, and its digits identify it where an op takes it. If the two programs
differ only in such operands, of ops in ``OPERANDS``, these operands become inputs, and each call computes them in
Python, as eager does. Any other use of the float (a comparison, ``int(beta)``, a dropout's ``p``) is noted or makes the
programs differ, and then the float stays a constant.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.guards.places import GuardedPlace
from autopar.capture.guards.values import is_number
from autopar.ir.nodes import make_node, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.ir.text.tokens import can_name
from autopar.torch_private import aten, present

# op that takes a number → the position of the number, and the op that takes a tensor there
OPERANDS: dict[Any, tuple[int, Any]] = present({
    aten.mul.Tensor: (1, aten.mul.Tensor), aten.mul.Scalar: (1, aten.mul.Tensor), aten.div.Tensor: (1, aten.div.Tensor),
    aten.div.Scalar: (1, aten.div.Tensor), aten.add.Tensor: (1, aten.add.Tensor), aten.add.Scalar: (1, aten.add.Tensor),
    aten.sub.Tensor: (1, aten.sub.Tensor), aten.sub.Scalar: (1, aten.sub.Tensor),
    aten.gt.Scalar: (1, aten.gt.Tensor), aten.ge.Scalar: (1, aten.ge.Tensor), aten.lt.Scalar: (1, aten.lt.Tensor),
    aten.le.Scalar: (1, aten.le.Tensor), aten.rsub.Scalar: (1, aten.sub.Tensor),
})  # fmt: skip
REVERSED = {aten.rsub.Scalar}
COMPARISONS = {aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar}
# as torch's kernels take a number
COMPUTED_IN = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


# a number; a place that holds one; or a function and the expressions of its arguments
Expression = float | GuardedPlace | tuple[Any, ...]


def _computed(expression: Expression, of: Callable[[GuardedPlace], float] = GuardedPlace.now) -> float:
    if isinstance(expression, tuple):
        return expression[0](*(_computed(part, of) for part in expression[1:]))
    return of(expression) if isinstance(expression, GuardedPlace) else expression


@dataclass(frozen=True)
class Number:
    """An input that a call computes.

    Attributes:
        name: the name of the input; begins with a dot.
        dtype: the dtype of the input.
        expression: what it is computed from.
    """

    name: str
    dtype: torch.dtype
    expression: Expression

    def tensor(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(_computed(self.expression), dtype=self.dtype, device=device)

    def where_all_are(self, value: float) -> float:
        """Return the number where each place holds ``value``."""
        return _computed(self.expression, lambda _: value)


class Tracked(float):
    """A float that notes what Python computes from it."""

    book: Book
    expression: Expression

    @staticmethod
    def of(book: Book, digits: float, expression: Expression) -> Tracked:
        known = book.known.get(digits)
        if known is None:
            known = book.known[digits] = Tracked(digits)
            known.book, known.expression = book, expression
        elif known.expression != expression:
            book.used_otherwise = True  # two computations have the same digits
        return known

    def compute(self) -> float:
        return _computed(self.expression)

    @property
    def name(self) -> str:
        """Return the name of the attribute that this number is computed from."""
        expression = self.expression
        while isinstance(expression, tuple):
            expression = next(part for part in expression[1:] if isinstance(part, (tuple, GuardedPlace)))
        assert isinstance(expression, GuardedPlace)
        return expression.key

    def __reduce__(self) -> Any:
        self.book.used_otherwise = True
        return float, (float.__add__(self, 0.0),)

    def __deepcopy__(self, memo: Any) -> Tracked:
        return self


class Book:
    """The computations that Python made from the tracked floats of one trace.

    Attributes:
        known: digits → the tracked float.
        used_otherwise: whether a tracked float had a use that cannot be followed.
    """

    def __init__(self) -> None:
        self.known: dict[float, Tracked] = {}
        self.used_otherwise = False


def _arithmetic(name: str, function: Callable[..., float], reverse: bool) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: Tracked, *others: Any) -> Any:
        if any(type(other) not in (int, float, Tracked) for other in others):
            return NotImplemented if others else plain(self)
        digits = plain(self, *others)
        if not isinstance(digits, float) or not math.isfinite(digits):
            self.book.used_otherwise = True
            return digits
        values = [other.expression if type(other) is Tracked else other for other in others]
        return Tracked.of(
            self.book, digits, (function, *values, self.expression) if reverse else (function, self.expression, *values)
        )

    return method


def _noted(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: Tracked, *others: Any) -> Any:
        self.book.used_otherwise = True
        return plain(self, *others)

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Tracked, f"__{_name}__", _arithmetic(f"__{_name}__", getattr(operator, _name), False))
    setattr(Tracked, f"__r{_name}__", _arithmetic(f"__r{_name}__", getattr(operator, _name), True))
for _name in ("neg", "pos", "abs"):
    setattr(Tracked, f"__{_name}__", _arithmetic(f"__{_name}__", getattr(operator, _name), False))
for _name in ("bool", "int", "float", "trunc", "floor", "ceil", "round", "eq", "ne", "lt", "le", "gt", "ge", "hash",
              "repr", "str", "format", "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod",
              "getnewargs"):  # fmt: skip
    setattr(Tracked, f"__{_name}__", _noted(f"__{_name}__"))
for _name in ("hex", "is_integer", "as_integer_ratio", "conjugate"):
    setattr(Tracked, _name, _noted(_name))


def can_be_input(place: GuardedPlace | None) -> bool:
    """Return whether a place holds a float that can be replaced for a trace."""
    return place is not None and type(place.holder) is dict and not place.computed and is_number(place.now())


@contextlib.contextmanager
def tracked(places: Sequence[GuardedPlace]) -> Iterator[Book]:
    """Put tracked floats into these places while the ``with`` block runs."""
    book = Book()
    before = [(place, place.now()) for place in places]
    for k, (place, value) in enumerate(before):
        near = 1e-5 * math.sqrt(k + 2)
        place.holder[place.key] = Tracked.of(book, value * (1 + near) if value else near, place)
    try:
        yield book
    finally:
        for place, value in before:
            place.holder[place.key] = value


@dataclass(frozen=True)
class Taken:
    """A node that takes a tracked float as its operand at ``position``, computed in ``dtype``."""

    node: fx.Node
    position: int
    number: Tracked
    dtype: torch.dtype


def taken_by(constant: Program, other: Program, book: Book) -> list[Taken] | None:
    """Return where a program uses the numbers that are tracked in ``other``.

    ``None`` if the programs differ in anything else. Linear in their sizes.
    """
    uses: list[Taken] = []
    if book.used_otherwise or len(list(constant.nodes)) != len(list(other.nodes)):
        return None
    for a, b in zip(constant.nodes, other.nodes, strict=True):
        if (a.op, a.name, a.target, record_of(a).type) != (b.op, b.name, b.target, record_of(b).type):
            return None
        if a.op == "get_attr" and constant.constants[str(a.target)].meaning != other.constants[str(b.target)].meaning:
            return None
        if len(a.args) != len(b.args) or _text(a.kwargs) != _text(b.kwargs):
            return None
        for k in (k for k, (x, y) in enumerate(zip(a.args, b.args, strict=True)) if _text(x) != _text(y)):
            taken = _taken(a, b, k, book)
            if taken is None:
                return None
            uses.append(taken)
    return uses


def _taken(a: fx.Node, b: fx.Node, position: int, book: Book) -> Taken | None:
    value = b.args[position]
    number = book.known.get(value) if type(value) is float else None
    if (
        number is None
        or OPERANDS.get(a.target, (None,))[0] != position
        or len(a.args) != 2
        or a.kwargs
        or not isinstance(a.args[0], fx.Node)
    ):
        return None
    if repr(number.compute()) != repr(a.args[position]):
        return None
    operand, result = record_of(a.args[0]).type, record_of(a).type
    if not isinstance(operand, TensorType) or not isinstance(result, TensorType):
        return None
    dtype = COMPUTED_IN.get(operand.dtype)
    if dtype is None and not operand.dtype.is_complex:  # whole numbers
        dtype = COMPUTED_IN.get(torch.get_default_dtype() if a.target in COMPARISONS else result.dtype)
    if dtype is None or (dtype != operand.dtype and operand.dtype.is_floating_point and not operand.shape):
        return None
    return Taken(a, position, number, dtype)


def _text(value: Any) -> str:
    return repr(value)  # nodes by name; distinguishes 1, 1.0 and True; NaN equals NaN


def put_in(program: Program, taken: Sequence[Taken]) -> tuple[Number, ...]:
    """Turn the numbers that a program uses into inputs after its other inputs, named after their attributes."""
    before = next(
        node for node in program.nodes if node.op != "placeholder" or record_of(node).role in ("tangent", "seed")
    )
    graph, used = program.graph, {node.name for node in program.nodes}
    homes: dict[tuple[int, torch.dtype], fx.Node] = {}
    numbers = []
    for use in taken:
        key = id(use.number), use.dtype
        if key not in homes:
            name = _free(use.number.name, used)
            home = homes[key] = make_node(graph, name, "placeholder", name, (), {})
            first = record_of(use.node)
            record = Record(TensorType((), use.dtype), role="input", name=f".{name}")
            set_record(home, record._replace(module=first.module, source=first.source))
            before.prepend(home)
            numbers.append(Number(f".{name}", use.dtype, use.number.expression))
        op = OPERANDS[use.node.target][1]
        operands = [use.node.args[0], homes[key]]
        use.node.args = tuple(reversed(operands) if use.node.target in REVERSED else operands)
        use.node.target = op
    return tuple(numbers)


def _free(base: str, used: set[str]) -> str:
    base = base if can_name(base) else f"{base}_1"
    name, k = base, 0
    while name in used:
        k += 1
        name = f"{base}_{k}"
    used.add(name)
    return name
