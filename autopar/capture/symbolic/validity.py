"""Decide which sizes a capture with symbols serves: its patterns of shapes, and the conditions that its trace decided.

x : [s0 s1 64]        s1 <= 512        embeddings.py:88  if length > self.positions: …
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy

from autopar.ir.sizes import Size, Values, expression_text, value_of

Shapes = Mapping[str, tuple[int, ...]]  # input → shape

SIGNS: tuple[tuple[Any, str], ...] = (
    (sympy.Eq, "=="), (sympy.Ne, "!="), (sympy.Le, "<="), (sympy.Lt, "<"), (sympy.Ge, ">="), (sympy.Gt, ">"),
)  # fmt: skip


@dataclass(eq=False)
class SizeGuard:
    """A condition on sizes that a trace decided: the program is that of sizes for which it holds.

    Attributes:
        text: the condition in words.
        source: the user's line that needs it; "" where torch alone does.
        condition: in symbols; ``None`` for a fixed dim, which is compared by itself.
        failed: how many new sizes it did not hold for.
        recaptures: how many captures were made because of it.
    """

    text: str
    source: str
    condition: Any = None
    failed: int = 0
    recaptures: int = 0

    def holds(self, values: Values) -> bool:
        """Return whether it holds at these values of symbols."""
        numbers = {each: sympy.Integer(int(value)) for each, value in values.items()}
        return bool(self.condition.xreplace(numbers) == sympy.true)


@dataclass(frozen=True)
class Misfit:
    """Why a capture does not serve a call: the guard that does not hold, and the sizes."""

    guard: SizeGuard
    values: str

    def __str__(self) -> str:
        line = f"\n    {self.guard.source}" if self.guard.source else ""
        return f"{self.values}, and the capture is for {self.guard.text}{line}"


@dataclass(eq=False)
class Validity:
    """The sizes that a capture with symbols serves.

    Attributes:
        shapes: input → its shape; symbols are lengths of at least 2.
        guards: the conditions.
        fixed: input and dim → the guard of a length that is no symbol.
    """

    shapes: Shapes
    guards: tuple[SizeGuard, ...]
    fixed: dict[tuple[str, int], SizeGuard] = field(default_factory=dict)

    @property
    def values(self) -> Values:
        """The values of all symbols in the call that was captured."""
        return {
            size.expression: int(size)
            for shape in self.shapes.values()
            for size in shape
            if isinstance(size, Size) and size.expression.is_Symbol
        }

    @property
    def all_guards(self) -> tuple[SizeGuard, ...]:
        return (*self.fixed.values(), *self.guards)

    def fits(self, shapes: Shapes) -> Values | Misfit:
        """Return the value of each symbol for a call's shapes, or why the capture does not serve them."""
        values: dict[sympy.Symbol, int] = {}
        places = [
            (name, d, size, shapes[name][d]) for name, shape in self.shapes.items() for d, size in enumerate(shape)
        ]
        for name, d, size, now in places:
            if isinstance(size, Size) and size.expression.is_Symbol:
                known = values.setdefault(size.expression, now)
                if known != now:
                    return self._misfit(name, d, now, f"dim {d} of {name} is {size}, which is {known}")
                if now < 2:
                    return self._misfit(name, d, now, f"{size} >= 2")
        for name, d, size, now in places:
            wanted = value_of(size.expression, values) if isinstance(size, Size) else size
            if wanted != now:
                return self._misfit(name, d, now, f"dim {d} of {name} is {size}")
        for guard in self.guards:
            if not guard.holds(values):
                return Misfit(guard, ", ".join(f"{each} is {value}" for each, value in values.items()))
        return values

    def _misfit(self, name: str, d: int, now: int, text: str) -> Misfit:
        guard = self.fixed.setdefault((name, d), SizeGuard(text, ""))
        return Misfit(guard, f"dim {d} of {name} is {now}")


def condition_text(condition: Any) -> str:
    """Return a condition in words: ``s1 <= 512``."""
    for kind, sign in SIGNS:
        if isinstance(condition, kind):
            left, right = condition.args
            return f"{expression_text(left)} {sign} {expression_text(right)}"
    return str(condition)
