"""Parse the notation of sharding rules: ``m k, k n -> m n``.

A pattern lists the operands of an op, ``->``, and its results, each as the factors of its dims. A *factor* is one loop
of the op, as in einsum: equal names are one factor.

==============  ====================================================================================
``m``           a dim that is the factor m
``(a b)``       a merged dim, major first
``k!``          a factor that must stay whole: the op cannot be split along it
``1``           a size-one dim: never split
``...``         any number of leading dims, aligned at the right; a size-one dim in them broadcasts
``by max``      at the end: results that lack a split factor are pending max instead of pending sum
``()``          an operand or result without dims: ``b c!, b -> (), ()`` has two scalar results
``own``         a result that is no data, and an operand that reads it: each rank has its own
==============  ====================================================================================

A split factor that a result lacks leaves that result *pending*. What is ``own`` is never pending and never moved: the
state of a generator, a workspace, a debug mask. Only the op's own backward reads it, on the rank that made it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

ELLIPSIS = "..."
OWN = "own"
KINDS = ("sum", "max", "min", "prod", "avg")

DimPattern = tuple[str, ...]  # factor names, major first; (ELLIPSIS,) or () for a size-one dim
OWN_DIMS: tuple[DimPattern, ...] = ((OWN,),)  # stands for all dims of a tensor that is each rank's own


@dataclass(frozen=True)
class Pattern:
    """A parsed rule: factors of operands and results, factors that must stay whole, and the kind of reduction."""

    text: str
    operands: tuple[tuple[DimPattern, ...], ...]
    results: tuple[tuple[DimPattern, ...], ...]
    whole: frozenset[str]
    kind: str = "sum"

    def __str__(self) -> str:
        return self.text


_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<whole>!?)|(?P<sign>\.\.\.|[()1])|(?P<bad>\S))")


@cache
def parse_pattern(text: str) -> Pattern:
    """Read a rule; ``ValueError`` quotes the rule and says what is wrong with it."""
    body, by, kind = text.partition(" by ")
    kind = kind.strip() if by else "sum"
    if kind not in KINDS:
        raise _wrong(text, f"{kind!r} is no reduction; 'by' takes one of {', '.join(KINDS)}")
    sides = body.split("->")
    if len(sides) != 2:
        raise _wrong(text, "it needs exactly one '->' between operands and results")
    whole: set[str] = set()
    bare: set[str] = set()
    operands = _side(text, sides[0], whole, bare)
    results = _side(text, sides[1], whole, bare)
    if not results:
        raise _wrong(text, "it has no result; write '()' for a result without dims")
    if "by" in whole | bare:
        raise _wrong(text, f"'by' stands at the end and takes one of {', '.join(KINDS)}; it cannot name a factor")
    if mixed := whole & bare:
        raise _wrong(text, f"factor {min(mixed)!r} is written with '!' in one place and without in another")
    return Pattern(text, operands, results, frozenset(whole), kind)


def _side(text: str, side: str, whole: set[str], bare: set[str]) -> tuple[tuple[DimPattern, ...], ...]:
    if not side.strip():
        return ()
    alone = {"()": (), OWN: OWN_DIMS}
    return tuple(
        alone[name] if (name := tensor_text.strip()) in alone else _tensor(text, tensor_text, whole, bare)
        for tensor_text in side.split(",")
    )


def _tensor(text: str, tensor_text: str, whole: set[str], bare: set[str]) -> tuple[DimPattern, ...]:
    dims: list[DimPattern] = []
    group: list[str] | None = None
    names: set[str] = set()
    if not tensor_text.strip():
        raise _wrong(text, "a tensor between commas is empty; write '()' for one without dims")
    if re.search(r"\(\s*\)", tensor_text):
        raise _wrong(text, f"'()' is a tensor of its own, not a dim, in {tensor_text.strip()!r}; a size-one dim is '1'")
    for match in _TOKEN.finditer(tensor_text.rstrip()):
        name, sign = match["name"], match["sign"]
        if match["bad"]:
            raise _wrong(text, f"{match['bad']!r} in {tensor_text.strip()!r} is not part of the notation")
        if name:
            if name in names:
                raise _wrong(text, f"factor {name!r} occurs twice in {tensor_text.strip()!r}")
            if name == OWN:
                raise _wrong(text, f"'own' is a tensor of its own, not a dim, in {tensor_text.strip()!r}")
            names.add(name)
            (whole if match["whole"] else bare).add(name)
            if group is None:
                dims.append((name,))
            else:
                group.append(name)
        elif sign == "(":
            if group is not None:
                raise _wrong(text, f"parentheses do not nest in {tensor_text.strip()!r}")
            group = []
        elif sign == ")":
            if group is None:
                raise _wrong(text, f"')' without '(' in {tensor_text.strip()!r}")
            dims.append(tuple(group))
            group = None
        elif sign == ELLIPSIS:
            if group is not None or (ELLIPSIS,) in dims:
                raise _wrong(text, f"'...' stands once in a tensor, outside parentheses: {tensor_text.strip()!r}")
            dims.append((ELLIPSIS,))
        else:
            dims.append(()) if group is None else None
    if group is not None:
        raise _wrong(text, f"'(' is not closed in {tensor_text.strip()!r}")
    return tuple(dims)


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(f"rule {text!r}: {why}")
