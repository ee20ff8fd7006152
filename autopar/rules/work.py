"""Parse the work of an op, its floating point operations, in the factors of its rule: ``2 m k n``.

Terms are joined by ``+``; each is a product of numbers and factors. A number is whole or a quotient, ``1/3``. ``...``
stands for all leading dims. A factor may occur twice: ``... i i c``. Additions and multiplications count as one
operation each, so a sum of products has a 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache

from autopar.rules.notation import ELLIPSIS, Pattern


@dataclass(frozen=True)
class Term:
    """A product of a number, ``times / over``, and of factors."""

    times: int
    over: int
    factors: tuple[str, ...]

    def count(self, sizes: Mapping[str, int]) -> int:
        """Return the operations for factors of these sizes, rounded down."""
        return self.times * math.prod([sizes[factor] for factor in self.factors]) // self.over


Work = tuple[Term, ...]

_WORD = re.compile(r"(?P<number>[0-9]+(/0*[1-9][0-9]*)?)|(?P<factor>[A-Za-z_][A-Za-z0-9_]*|\.\.\.)")


@cache
def parse_work(text: str) -> Work:
    """Read a work; ``ValueError`` quotes it and says what is wrong with it. An empty text is no work."""
    return tuple(_term(text, term) for term in text.split("+")) if text.strip() else ()


def _term(text: str, term: str) -> Term:
    times, over, factors = 1, 1, []
    if not term.strip():
        raise ValueError(f"work {text!r}: a term between '+' is empty; write a work as '2 m k n + m n'")
    for word in term.split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(
                f"work {text!r}: {word!r} is neither a number nor a factor; write a work as '2 m k n + m n'"
            )
        if match["number"]:
            above, _, below = word.partition("/")
            times, over = times * int(above), over * int(below or 1)
        else:
            factors.append(word)
    return Term(times, over, tuple(factors))


def check_work(text: str, pattern: Pattern) -> None:
    """Check that a work has no other factors than a rule; ``ValueError`` quotes both."""
    known = {factor for side in (*pattern.operands, *pattern.results) for dim in side for factor in dim}
    for term in parse_work(text):
        for factor in term.factors:
            if factor not in known:
                raise ValueError(
                    f"rule {pattern.text!r}: its work {text!r} has the factor {factor!r}, which the rule does not "
                    f"have; it has {', '.join(sorted(known)) or 'none'}"
                )


def bound_work(text: str, factors: Collection[str]) -> Work:
    """Return the work of one call, with ``...`` replaced by its factors.

    Terms with factors of operands that the call leaves out do not count.
    """
    leading = tuple(factor for factor in factors if factor.startswith(ELLIPSIS))
    terms = []
    for term in parse_work(text):
        opened = tuple(f for factor in term.factors for f in (leading if factor == ELLIPSIS else (factor,)))
        if all(factor in factors for factor in opened):
            terms.append(replace(term, factors=opened))
    return tuple(terms)
