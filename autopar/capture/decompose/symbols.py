"""Translate sizes with symbols into those that torch traces with, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import sympy
import torch

from autopar.errors import CaptureError
from autopar.ir.sizes import Size, Values, sized
from autopar.torch_private import FloorDiv, PythonMod, SymbolicSizes, size_expression, size_hint

COMPUTED: dict[Any, Callable[[Any, Any], Any]] = {
    sympy.Add: lambda a, b: a + b,
    sympy.Mul: lambda a, b: a * b,
    FloorDiv: lambda a, b: a // b,
    PythonMod: lambda a, b: a % b,
    sympy.Max: torch.sym_max,
    sympy.Min: torch.sym_min,
}


class Symbols:
    """Symbols for one trace.

    Attributes:
        made: makes them, and notes the conditions that the trace decides.

    Args:
        values: symbol → its value, at least 2.
    """

    def __init__(self, values: Values) -> None:
        self.made = SymbolicSizes(str)
        self._values = values
        self._traced = {each: self.made.new(each.name, value) for each, value in values.items()}
        self._names = {size_expression(size): each for each, size in self._traced.items()}

    def traced(self, size: int) -> Any:
        """Return a size as torch traces with it."""
        return self._of(size.expression) if isinstance(size, Size) else size

    def _of(self, expression: sympy.Expr) -> Any:
        if expression.is_Symbol:
            return self._traced[expression]
        if expression.is_Integer:
            return int(expression)
        if expression.is_Pow:
            return reduce(COMPUTED[sympy.Mul], [self._of(expression.base)] * int(expression.exp))
        compute = next(function for kind, function in COMPUTED.items() if isinstance(expression, kind))
        return reduce(compute, map(self._of, expression.args))

    def size(self, value: Any) -> Any:
        """Return a size of the trace as a program has it; anything else as it is."""
        if not isinstance(value, torch.SymInt):
            return value
        expression = sympy.sympify(size_expression(value)).xreplace(self._names)
        return sized(size_hint(value), sympy.expand(expression), self._values)

    def refuse_conditions(self) -> None:
        """Raise ``CaptureError`` if the trace is only that of some sizes."""
        if self.made.conditions:
            condition, _ = self.made.conditions[0]
            raise CaptureError(f"an op is expanded in another way unless {condition.xreplace(self._names)}")
