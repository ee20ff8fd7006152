"""Define sizes that follow from symbols: an int with the value in one call, and the expression for all calls.

    s0 → 8        s1 → 64        s0*s1 → 512        {s0 + 1} → 9

A size compares and computes as its int, so that rules, costs and searches work with the sizes of the call that was
captured. Arithmetic of ints keeps the expression. Its hash is not that of the int, so that caches tell ``s0`` from 8.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, reduce
from typing import Any

import sympy
from torch import fx

from autopar.torch_private import FloorDiv, PythonMod

Values = Mapping[sympy.Symbol, int]  # symbol → its value in one call

OPERATIONS: dict[str, tuple[Callable[[int, int], int], Callable[[Any, Any], Any]]] = {
    "+": (operator.add, operator.add),
    "-": (operator.sub, operator.sub),
    "*": (operator.mul, operator.mul),
    "//": (operator.floordiv, FloorDiv),
    "%": (operator.mod, PythonMod),
}  # sign → on ints, on expressions
FUNCTIONS: dict[str, Callable[..., Any]] = {"Max": sympy.Max, "Min": sympy.Min}


class Size(int):
    """The length of a dim, or a number that follows from lengths.

    Attributes:
        expression: in symbols, which are positive integers.
        values: the value of each symbol in the call that was captured.
    """

    expression: sympy.Expr
    values: Values
    _hash: int

    def __new__(cls, value: int, expression: sympy.Expr, values: Values) -> Size:
        self = int.__new__(cls, value)
        self.expression, self.values = expression, values
        self._hash = hash((value, expression))
        return self

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return Size, (int(self), self.expression, dict(self.values))

    def __repr__(self) -> str:
        return f"{{{expression_text(self.expression)}}}"

    def __str__(self) -> str:
        return size_text(self)

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else str(self)


def _arithmetic(sign: str, reflected: bool) -> Callable[[Any, Any], Any]:
    on_ints, _ = OPERATIONS[sign]

    def compute(self: Size, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        a, b = (other, self) if reflected else (self, other)
        values = self.values
        if isinstance(other, Size) and other.values is not values:
            values = {**values, **other.values}
        return sized(on_ints(int(a), int(b)), _combined(sign, expression_of(a), expression_of(b)), values)

    return compute


for _sign, _name in (("+", "add"), ("-", "sub"), ("*", "mul"), ("//", "floordiv"), ("%", "mod")):
    setattr(Size, f"__{_name}__", _arithmetic(_sign, False))
    setattr(Size, f"__r{_name}__", _arithmetic(_sign, True))
Size.__neg__ = lambda self: 0 - self  # type: ignore[method-assign]


@lru_cache(maxsize=65536)
def _combined(sign: str, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    result = sympy.expand(OPERATIONS[sign][1](a, b))
    if sign == "%" and not result.is_number and sympy.expand(FloorDiv(a, b) * b - a) == 0:
        return sympy.S.Zero
    return result


def sized(value: int, expression: sympy.Expr, values: Values) -> int:
    """Return a number with its expression; a plain int if it follows from no symbol."""
    return value if expression.is_number else Size(value, expression, values)


def expression_of(value: int) -> sympy.Expr:
    """Return the expression of a number."""
    return value.expression if isinstance(value, Size) else sympy.Integer(int(value))


@lru_cache(maxsize=256)
def symbol(name: str) -> sympy.Symbol:
    """Return the symbol of a name: a positive integer."""
    return sympy.Symbol(name, positive=True, integer=True)


def divides(count: int, size: int) -> bool:
    """Return whether a number divides another one, whatever the values of symbols are."""
    rest = size % count
    return rest == 0 and not isinstance(rest, Size)


def gcd(*sizes: int) -> int:
    """Return the greatest common divisor, whatever the values of symbols are."""
    symbolic = [size for size in sizes if isinstance(size, Size)]
    if not symbolic:
        return math.gcd(*sizes)
    values = {each: value for size in symbolic for each, value in size.values.items()}
    expression = reduce(_gcd, map(expression_of, sizes))
    return sized(value_of(expression, values), expression, values)


@lru_cache(maxsize=4096)
def _gcd(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return sympy.gcd(a, b)


def value_of(expression: sympy.Expr, values: Values) -> int:
    """Return the value of an expression. ``ValueError`` if it is no whole number there, or a symbol has no value."""
    value = expression.xreplace({each: sympy.Integer(int(n)) for each, n in values.items()})
    if not value.is_Integer:
        raise ValueError(f"{expression} is {value} at {values_text(values)}, which is no whole number")
    return int(value)


class AtValues:
    """Replaces sizes by their values in another call. Equal expressions are computed once.

    Args:
        values: symbol → its value there.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self._known: dict[sympy.Expr, int] = {}

    def size(self, value: Any) -> Any:
        """Return the value of a size; anything else as it is."""
        if not isinstance(value, Size):
            return value
        known = self._known.get(value.expression)
        if known is None:
            known = self._known[value.expression] = value_of(value.expression, self.values)
        return known

    def __call__(self, value: Any) -> Any:
        """Return a value with the sizes inside of containers replaced; anything else as it is."""
        return map_sizes(value, self.size)


def map_sizes(value: Any, function: Callable[[Any], Any]) -> Any:
    """Replace the leaves of lists, tuples and dicts by ``function`` of them."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map_sizes(member, function) for member in value)
    if isinstance(value, Mapping):
        return {key: map_sizes(member, function) for key, member in value.items()}
    return value if isinstance(value, fx.Node) else function(value)


def sizes_in(value: Any) -> Iterator[Size]:
    """Return all sizes inside of containers."""
    if isinstance(value, Size):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from sizes_in(member)
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from sizes_in(member)


# -- text --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def expression_text(expression: sympy.Expr) -> str:
    """Return an expression as text: ``2*s0*s1``, ``s0 + 1``, ``s0//2``."""
    if expression.is_Add:
        first, *rest = sorted(expression.args, key=lambda term: (term.is_number, str(term)))
        text = expression_text(first)
        for term in rest:
            negative = term.could_extract_minus_sign()
            text += f" - {_factor(-term)}" if negative else f" + {_factor(term)}"
        return text
    if expression.is_Mul:
        number, factors = expression.as_coeff_mul()
        texts = [text for factor in sorted(factors, key=str) for text in _powers(factor)]
        return "*".join([*([] if number == 1 else ["-1" if number == -1 else str(number)]), *texts])
    if expression.is_Pow:
        return "*".join(_powers(expression))
    if isinstance(expression, (FloorDiv, PythonMod)):
        sign = "//" if isinstance(expression, FloorDiv) else "%"
        base, divisor = expression.args
        within = (
            expression_text(divisor) if divisor.is_Symbol or divisor.is_Integer else f"({expression_text(divisor)})"
        )
        return f"{_factor(base)}{sign}{within}"
    if isinstance(expression, (sympy.Max, sympy.Min)):
        return f"{type(expression).__name__}({', '.join(sorted(map(expression_text, expression.args)))})"
    return str(expression)


def _powers(factor: sympy.Expr) -> list[str]:
    base, exponent = factor.as_base_exp()
    return [_factor(base)] * int(exponent) if exponent.is_Integer and exponent > 0 else [f"({factor})"]


def _factor(expression: sympy.Expr) -> str:
    plain = expression.is_Symbol or expression.is_Integer or expression.is_Mul
    return expression_text(expression) if plain else f"({expression_text(expression)})"


def size_text(size: Size) -> str:
    """Return a size as the dims of a type show it: ``2*s0*s1``, and in braces what is no product: ``{s0 + 1}``."""
    expression = size.expression
    product = expression.is_Symbol or (
        all(factor.is_Symbol or factor.is_Pow for factor in expression.as_coeff_mul()[1])
        and not expression.could_extract_minus_sign()
        and all(factor.as_base_exp()[0].is_Symbol for factor in expression.as_coeff_mul()[1])
    )
    text = expression_text(expression)
    return text if product else f"{{{text}}}"


def values_text(values: Values) -> str:
    """Return ``s0=8 s1=64``."""
    return " ".join(f"{each}={value}" for each, value in values.items())


def read_size(text: str, values: Values) -> int:
    """Return the size that prints as a text. ``ValueError`` if it is none, or has a symbol without a value."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} is no size; sizes are as in s0, 2*s0*s1, s0 + 1, s0//2") from None
    return _read(tree, text, values)


SIGNS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}


def _read(tree: ast.expr, text: str, values: Values) -> int:
    match tree:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return 0 - _read(operand, text, values)
        case ast.Name(id=name):
            if symbol(name) not in values:
                known = ", ".join(map(str, values)) or "none"
                raise ValueError(f"there is no size {name!r}; the sizes of the header are {known}")
            return Size(values[symbol(name)], symbol(name), values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
            on_ints, _ = OPERATIONS[SIGNS[type(op)]]
            return on_ints(_read(left, text, values), _read(right, text, values))
        case ast.Call(func=ast.Name(id=name), args=args) if name in FUNCTIONS:
            read = [_read(arg, text, values) for arg in args]
            expression = FUNCTIONS[name](*map(expression_of, read))
            return sized(value_of(expression, values), expression, values)
    raise ValueError(f"{text!r} is no size; sizes are as in s0, 2*s0*s1, s0 + 1, s0//2")
