"""Make sizes that are symbols, and read their expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._guards import Source  # tried on 2.11 to 2.15: where a symbol comes from

# experimental; tried on 2.11 to 2.15: sizes that are symbols
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv as FloorDiv  # tried on 2.11 to 2.15: a // b, simplified
from torch.utils._sympy.functions import PythonMod as PythonMod  # tried on 2.11 to 2.15: a % b, simplified


class _Named(Source):
    """The origin of a symbol, which torch identifies by its name. Tried on 2.11 to 2.15."""

    def __init__(self, name: str) -> None:
        self._own_name = name

    @property
    def _name_template(self) -> str:
        return self._own_name

    def __hash__(self) -> int:
        return hash(self._own_name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and self._own_name == other._own_name


class SymbolicSizes(ShapeEnv):
    """Makes sizes that are symbols, and notes each condition on them that a trace decides. Tried on 2.11 to 2.15.

    Sizes 0 and 1 are no symbols, because ops treat them in their own ways. Two symbols with equal values are different
    until an op needs them to be equal.

    Args:
        line: returns the user's line that runs; it is called for each condition.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__(duck_shape=False)
        self._line = line

    def _get_sloc(self, framework_loc: str | None = None) -> Any:
        return self._line()  # instead of a stack, which takes longer

    def new(self, name: str, value: int) -> torch.SymInt:
        """Return a new symbol with a value of at least 2."""
        symbol = self.create_symbol(value, _Named(name), DimDynamic.DYNAMIC)
        return cast(torch.SymInt, self.create_symintnode(symbol, hint=value))

    @property
    def conditions(self) -> list[tuple[Any, str]]:
        """The conditions that hold for the values of the trace, each with the line that needs it."""
        return [(guard.expr, cast(str, guard.sloc)) for guard in self.guards]


def size_expression(size: torch.SymInt | torch.SymFloat | torch.SymBool | int) -> Any:
    """Return the expression of a size, with symbols that are known to be equal replaced by one.

    Tried on 2.11 to 2.15.
    """
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def size_hint(size: torch.SymInt) -> int:
    """Return the value of a size in the trace, without a condition. Tried on 2.11 to 2.15."""
    return int(size.node.hint)
