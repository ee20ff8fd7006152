"""Find the parts in which each factor of a program can be split, by carrying the sizes of merged dims through all ops.

A dim of 65,536 that a view makes of 8 × 8,192 can be split in its two parts. So can the rows of a matrix product that
reads the view. A *cut* of a dim is the number of pieces that its major parts make up, here 8: splits of the parts
before a cut and of those after it are different strategies.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from autopar.rules.strategies import Bound

Cuts = Mapping[str, tuple[int, ...]]  # factor → the sizes of its parts, major first


class CutSearch:
    """Carries cuts between the dims of values and the factors of the ops that read and make them, to a fixpoint.

    Linear in the program: a dim has few cuts, and each is carried over each op once.
    """

    def __init__(self) -> None:
        self._places: defaultdict[tuple[int, int], list[tuple[int, str, int, int]]] = defaultdict(list)
        self._factors: defaultdict[tuple[int, str], list[tuple[tuple[int, int], int]]] = defaultdict(list)
        self._dim_cuts: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self._factor_cuts: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
        self._open: list[tuple[bool, tuple[int, int] | tuple[int, str], int]] = []

    def add(self, op: int, bound: Bound, operands: Sequence[int], results: Sequence[int | None]) -> None:
        """Add an op with the numbers of the values that it reads and makes."""
        rows = [*zip(operands, bound.operands, strict=True), *zip(results, bound.results, strict=True)]
        for value, dims in rows:
            if value is None or dims is None:
                continue
            for d, factors in enumerate(dims):
                before = 1  # pieces that the factors so far make up
                for factor in factors:
                    size = bound.sizes[factor]
                    self._places[value, d].append((op, factor, before, size))
                    self._factors[op, factor].append(((value, d), before))
                    before *= size
                    if before < math.prod(bound.sizes[f] for f in factors):
                        self._add_to_dim((value, d), before)

    def cut(self, op: int, factor: str, sizes: Sequence[int]) -> None:
        """Cut a factor of an op in parts, which are known from elsewhere."""
        for cut in itertools.accumulate(sizes[:-1], operator.mul):
            self._add_to_factor((op, factor), cut)

    def run(self) -> None:
        """Carry all cuts."""
        while self._open:
            of_dim, place, cut = self._open.pop()
            if of_dim:
                for op, factor, before, size in self._places[place]:  # type: ignore[index]
                    if cut % before == 0 and 1 < cut // before < size and size % (cut // before) == 0:
                        self._add_to_factor((op, factor), cut // before)
            else:
                for dim, before in self._factors[place]:  # type: ignore[index]
                    self._add_to_dim(dim, cut * before)

    def of(self, op: int, bound: Bound) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the parts of each factor of an op that has several."""
        parts = {}
        for factor, size in bound.sizes.items():
            if cuts := self._factor_cuts.get((op, factor)):
                parts[factor] = part_sizes(size, cuts)
        return parts

    def _add_to_dim(self, place: tuple[int, int], cut: int) -> None:
        if cut > 1 and cut not in self._dim_cuts[place]:
            self._dim_cuts[place].add(cut)
            self._open.append((True, place, cut))

    def _add_to_factor(self, place: tuple[int, str], cut: int) -> None:
        if cut not in self._factor_cuts[place]:
            self._factor_cuts[place].add(cut)
            self._open.append((False, place, cut))


def part_sizes(size: int, cuts: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of the parts between cuts, major first.

    ``part_sizes(4096, {8, 32})`` is ``(8, 4, 128)``. A cut that does not divide the next one is left out: no parts are
    common to both.
    """
    parts, last = [], 1
    for cut in sorted(cuts):
        if cut % last == 0 and size % cut == 0:
            parts.append(cut // last)
            last = cut
    return (*parts, size // last)
