"""The notation of sharding rules: what patterns mean, and what is said of wrong ones."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.rules.notation import ELLIPSIS, KINDS, OWN_DIMS, Pattern, parse_pattern


@pytest.mark.parametrize(
    ("text", "operands", "results", "whole", "kind"),
    [
        ("m k, k n -> m n", ((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),), "", "sum"),
        ("..., ... -> ...", (((ELLIPSIS,),), ((ELLIPSIS,),)), (((ELLIPSIS,),),), "", "sum"),
        ("... d! -> ... d!", (((ELLIPSIS,), ("d",)),), (((ELLIPSIS,), ("d",)),), "d", "sum"),
        ("(a b) c -> a b c", ((("a", "b"), ("c",)),), ((("a",), ("b",), ("c",)),), "", "sum"),
        ("m 1 -> m", ((("m",), ()),), ((("m",),),), "", "sum"),
        ("b c!, b -> (), ()", ((("b",), ("c",)), (("b",),)), ((), ()), "c", "sum"),
        ("m k -> m by max", ((("m",), ("k",)),), ((("m",),),), "", "max"),
        ("-> n", (), ((("n",),),), "", "sum"),
        ("m, own -> m, own", ((("m",),), OWN_DIMS), ((("m",),), OWN_DIMS), "", "sum"),
        ("()->()", ((),), ((),), "", "sum"),
        ("  b  (h! d!)->b h!,d! by  min ", ((("b",), ("h", "d")),), ((("b",), ("h",)), (("d",),)), "dh", "min"),
    ],
)
def test_patterns(text: str, operands: tuple, results: tuple, whole: str, kind: str) -> None:
    pattern = parse_pattern(text)
    assert pattern == Pattern(text, operands, results, frozenset(whole), kind)
    assert str(pattern) == text


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("m k -> m by median", "'median' is no reduction; 'by' takes one of sum, max, min, prod, avg"),
        ("m k -> m by max by min", "'max by min' is no reduction"),
        ("m k -> m by", "'by' stands at the end and takes one of sum, max, min, prod, avg; it cannot name a factor"),
        ("m k", "it needs exactly one '->' between operands and results"),
        ("m -> k -> m", "it needs exactly one '->' between operands and results"),
        ("", "it needs exactly one '->' between operands and results"),
        ("m k ->", "it has no result; write '()' for a result without dims"),
        ("m! k -> m", "factor 'm' is written with '!' in one place and without in another"),
        ("m, , k -> m", "a tensor between commas is empty; write '()' for one without dims"),
        ("m -> m,", "a tensor between commas is empty; write '()' for one without dims"),
        ("m * k -> m", "'*' in 'm * k' is not part of the notation"),
        ("m ! -> m", "'!' in 'm !' is not part of the notation"),
        ("m 2 -> m", "'2' in 'm 2' is not part of the notation"),
        ("m .. -> m", "'.' in 'm ..' is not part of the notation"),
        ("m m -> m", "factor 'm' occurs twice in 'm m'"),
        ("(m k) m -> m", "factor 'm' occurs twice in '(m k) m'"),
        ("(a (b c)) -> a", "parentheses do not nest in '(a (b c))'"),
        ("a b) -> a", "')' without '(' in 'a b)'"),
        ("(a b -> a", "'(' is not closed in '(a b'"),
        ("m () -> m", "'()' is a tensor of its own, not a dim, in 'm ()'; a size-one dim is '1'"),
        ("m own -> m", "'own' is a tensor of its own, not a dim, in 'm own'"),
        ("m -> own!", "'own' is a tensor of its own, not a dim, in 'own!'"),
        ("... m ... -> m", "'...' stands once in a tensor, outside parentheses: '... m ...'"),
        ("(... m) -> m", "'...' stands once in a tensor, outside parentheses: '(... m)'"),
    ],
)
def test_errors_quote_the_pattern_and_say_what_is_wrong(text: str, what: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"rule {text!r}: {what}")):
        parse_pattern(text)


FACTORS = st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)


@st.composite
def tensors(draw: st.DrawFn, whole: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    dims: list[tuple[str, ...]] = []
    for name in draw(FACTORS):
        if dims and dims[-1] and draw(st.booleans()):
            dims[-1] += (name,)
        else:
            dims.append((name,))
        if draw(st.integers(0, 4)) == 0:
            dims.append(())
    return ((ELLIPSIS,), *dims) if draw(st.booleans()) else tuple(dims)


def written(dims: tuple[tuple[str, ...], ...], whole: frozenset[str]) -> str:
    names = [[name + "!" * (name in whole) for name in dim] for dim in dims]
    return " ".join("1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in names) or "()"


@pytest.mark.simulated
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_written_is_what_is_read(data: st.DataObject) -> None:
    whole = frozenset(data.draw(FACTORS))
    operands, results = (tuple(data.draw(st.lists(tensors(whole), min_size=n, max_size=3))) for n in (0, 1))
    kind = data.draw(st.sampled_from(KINDS))
    sides = [", ".join(written(dims, whole) for dims in side) for side in (operands, results)]
    text = f"{sides[0]} -> {sides[1]} by {kind}"
    used = {name for dims in (*operands, *results) for dim in dims for name in dim}
    assert parse_pattern(text) == Pattern(text, operands, results, whole & used, kind)
