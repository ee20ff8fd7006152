"""Compare two curves, of losses or of norms of gradients, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TINY = 1e-30  # replaces a zero in a quotient
MOST = 0.05  # the tolerance does not grow above it
SHOWN = 9  # steps in the table, without the worst one


def allowed(tolerance: float, growth: float, step: int) -> float:
    """Return the tolerance of a step: it grows by a factor in 100 steps, up to ``MOST`` or the first one."""
    return min(tolerance * growth ** min(step / 100, 100.0), max(tolerance, MOST))


@dataclass(frozen=True)
class Comparison:
    """The values of the same steps on the mesh and on the single device."""

    parallel: Sequence[float]
    single: Sequence[float]
    skipped: frozenset[int] = frozenset()  # steps that both have skipped, whose values may not be finite

    def __post_init__(self) -> None:
        if not self.parallel or len(self.parallel) != len(self.single):
            raise ValueError(f"{len(self.parallel)} and {len(self.single)} steps cannot be compared")

    def difference(self, step: int) -> float:
        """Return the differences relative to the single device's values.

        A difference is infinite if a value is not finite, except in a step that both have skipped.
        """
        a, b = self.parallel[step], self.single[step]
        if step in self.skipped:
            return 0.0
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.inf
        return abs(a - b) / max(abs(b), TINY)

    @property
    def worst(self) -> int:
        """The first step with the largest difference."""
        return max(range(len(self.single)), key=self.difference)

    @property
    def largest(self) -> float:
        return self.difference(self.worst)

    def within(self, tolerance: float, growth: float = 1.0) -> bool:
        """Return whether all values are finite and none differs by more than the tolerance of its step."""
        return math.isfinite(self.largest) and all(
            self.difference(step) <= allowed(tolerance, growth, step) for step in range(len(self.single))
        )

    def steps(self) -> list[int]:
        """Return some steps to show: the first, the last, the worst, and some in between."""
        last = len(self.single) - 1
        return sorted({round(k * last / (SHOWN - 1)) for k in range(SHOWN)} | {self.worst})
