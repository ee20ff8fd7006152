"""Say of a call whether its sizes are beyond a crossover that was solved, so that another plan would be cheaper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.search.symbols.crossovers import Crossover


@dataclass(frozen=True)
class Solved:
    """Crossovers of a plan with another one that somebody has asked for.

    Attributes:
        symbol: ``batch`` or ``sequence``.
        crossovers: in ascending order.
    """

    symbol: str
    crossovers: tuple[Crossover, ...]


def about_crossed(solved: Sequence[Solved], sizes: Mapping[str, int]) -> list[str]:
    """Return a sentence for each comparison in which the other plan is the cheaper one at these sizes.

    Args:
        sizes: symbol → its value in the call.
    """
    notes = []
    for each in solved:
        if each.symbol not in sizes or not each.crossovers:
            continue
        size = sizes[each.symbol]
        below = [cross for cross in each.crossovers if cross.at <= size]
        if below and not below[-1].cheaper_above:
            where = f"from a {each.symbol} of {below[-1].at:.0f} on"
        elif not below and each.crossovers[0].cheaper_above:
            where = f"up to a {each.symbol} of {each.crossovers[0].at:.0f}"
        else:
            continue
        notes.append(f"the {each.symbol} is {size}, and {where} the plan that it was compared with is cheaper")
    return notes
