"""Solve for the sizes at which one plan becomes cheaper than another.

An expression in one symbol is brought to pieces: intervals with a polynomial each. A maximum or a minimum is split
where two of its arguments are equal, and the roots of the difference of two expressions are those of its polynomials.
Nothing is sampled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import sympy

from autopar.costs.symbolic import BANDWIDTHS
from autopar.errors import PlanError
from autopar.search.symbols.expression import Expression

Polynomial = tuple[float, ...]  # coefficients, the constant first
Piece = tuple[float, Polynomial]  # from where on, and the polynomial
Pieces = list[Piece]  # from 0 on, in ascending order

NEAR = 1e-12  # relative: two boundaries that are nearer are one


@dataclass(frozen=True)
class Crossover:
    """Where another plan becomes the cheaper one.

    Attributes:
        at: the value of the symbol; the prices are equal there.
        cheaper_above: whether the first plan is the cheaper one above it; below it the other is.
    """

    at: float
    cheaper_above: bool


def crossovers(one: Expression, other: Expression, symbol: str) -> list[Crossover]:
    """Return where the difference of two prices changes its sign, in ascending order.

    Other symbols have the values of ``one``. Where prices are equal on a whole interval, its ends count. Prices are
    polynomials in the seconds of a byte, so in a bandwidth the inverse is solved.

    Raises:
        PlanError: there is no such symbol, or an expression is not piecewise polynomial in it.
    """
    variable = one.symbol(symbol)
    other.symbol(symbol)
    if symbol in BANDWIDTHS:
        return _of_bandwidth(one, other, variable)
    fixed = {each: value for each, value in one.values.items() if each != variable}
    theirs = {
        each: value
        for each, value in other.values.items()
        if each != variable and (each not in fixed or each.name in BANDWIDTHS)
    }
    first = pieces_of(one.seconds.subs(fixed), variable)
    second = pieces_of(other.seconds.subs({**fixed, **theirs}), variable)
    found: list[Crossover] = []
    sign = 0.0
    for low, high, (mine, its) in _together([first, second]):
        difference = _plus(mine, _times(its, (-1.0,)))
        for start, end in itertools.pairwise((low, *_roots(difference, low, high), high)):
            now = np.sign(_value(difference, _between(start, end)))
            scale = abs(_value(mine, _between(start, end)))
            if abs(_value(difference, _between(start, end))) <= NEAR * scale:
                now = 0.0
            if now and sign and now != sign:
                found.append(Crossover(start, bool(now < 0)))
            sign = now or sign
    return found


def _of_bandwidth(one: Expression, other: Expression, bandwidth: sympy.Symbol) -> list[Crossover]:
    """Return the crossovers in a bandwidth, by way of the seconds of a byte."""
    byte = sympy.Symbol(f"seconds_of_a_byte_by_{bandwidth}", positive=True)

    def inverted(expression: Expression) -> Expression:
        values = {each: value for each, value in expression.values.items() if each != bandwidth}
        seconds = expression.seconds.subs(bandwidth, 1 / byte)
        return replace(expression, seconds=seconds, values={byte: 1 / expression.values[bandwidth], **values})

    found = crossovers(inverted(one), inverted(other), byte.name)
    return [Crossover(1 / cross.at, not cross.cheaper_above) for cross in reversed(found)]


def pieces_of(expression: sympy.Expr, variable: sympy.Symbol) -> Pieces:
    """Return the polynomials of an expression in one symbol, on the intervals of its positive values.

    Raises:
        PlanError: it is not piecewise polynomial, as where uneven pieces are rounded up.
    """
    if expression.is_number:
        return [(0.0, (float(expression),))]
    if expression == variable:
        return [(0.0, (0.0, 1.0))]
    parts = [pieces_of(argument, variable) for argument in expression.args]
    if isinstance(expression, sympy.Add):
        return _combined(parts, lambda polynomials: reduce(_plus, polynomials))
    if isinstance(expression, sympy.Mul):
        return _combined(parts, lambda polynomials: reduce(_times, polynomials))
    if isinstance(expression, (sympy.Max, sympy.Min)):
        return _extreme(parts, 1.0 if isinstance(expression, sympy.Max) else -1.0)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and expression.exp > 0:
        power = int(expression.exp)
        return _combined(parts[:1], lambda polynomials: reduce(_times, [polynomials[0]] * power))
    raise PlanError(
        f"the price is no polynomial in {variable} on any interval, for it has {expression}; capture the plan at a "
        f"size that the mesh divides"
    )


def _extreme(parts: Sequence[Pieces], sign: float) -> Pieces:
    """Return the maximum of piecewise polynomials, or with the sign -1 their minimum."""
    pieces: Pieces = []
    for low, high, polynomials in _together(parts):
        ends = {low, high}
        for one, other in itertools.combinations(set(polynomials), 2):
            ends.update(_roots(_plus(one, _times(other, (-1.0,))), low, high))
        for start, end in itertools.pairwise(sorted(ends)):
            at = _between(start, end)
            pieces.append((start, max(polynomials, key=lambda each, at=at: sign * _value(each, at))))  # type: ignore[misc]
    return _joined(pieces)


def _combined(parts: Sequence[Pieces], combine: Callable[[Sequence[Polynomial]], Polynomial]) -> Pieces:
    return _joined([(low, combine(polynomials)) for low, _, polynomials in _together(parts)])


def _together(parts: Sequence[Pieces]) -> list[tuple[float, float, list[Polynomial]]]:
    """Return the common intervals of several piecewise polynomials, each with its polynomials."""
    starts = sorted({start for pieces in parts for start, _ in pieces})
    at = [0] * len(parts)
    rows = []
    for low, high in itertools.pairwise((*starts, math.inf)):
        for k, pieces in enumerate(parts):
            while at[k] + 1 < len(pieces) and pieces[at[k] + 1][0] <= low:
                at[k] += 1
        rows.append((low, high, [pieces[k][1] for pieces, k in zip(parts, at, strict=True)]))
    return rows


def _joined(pieces: Pieces) -> Pieces:
    """Join neighbours with one polynomial."""
    joined: Pieces = []
    for start, polynomial in pieces:
        if not joined or joined[-1][1] != polynomial:
            joined.append((start, polynomial))
    return joined


def _roots(polynomial: Polynomial, low: float, high: float) -> list[float]:
    """Return the real roots inside an interval, in ascending order."""
    coefficients = np.array(polynomial)
    while len(coefficients) > 1 and coefficients[-1] == 0:
        coefficients = coefficients[:-1]
    if len(coefficients) < 2:
        return []
    roots = np.polynomial.polynomial.polyroots(coefficients)
    real = sorted(root.real for root in roots if abs(root.imag) <= NEAR * max(abs(root), 1e-300))
    return [float(root) for root in real if low < root < high]


def _between(low: float, high: float) -> float:
    return (low + high) / 2 if high < math.inf else 2 * low + 1


def _value(polynomial: Polynomial, at: float) -> float:
    return float(np.polynomial.polynomial.polyval(at, polynomial))


def _plus(one: Polynomial, other: Polynomial) -> Polynomial:
    return tuple(a + b for a, b in itertools.zip_longest(one, other, fillvalue=0.0))


def _times(one: Polynomial, other: Polynomial) -> Polynomial:
    result = [0.0] * (len(one) + len(other) - 1)
    for (i, a), (j, b) in itertools.product(enumerate(one), enumerate(other)):
        result[i + j] += a * b
    return tuple(result)
