"""Sizes that are symbols: arithmetic, text, and programs of other sizes."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import Mesh, Program, TextError
from autopar.ir.at_values import at_values
from autopar.ir.layout import DistAttr
from autopar.ir.sizes import AtValues, Size, divides, gcd, read_size, symbol
from autopar.report.guards import GuardReport, GuardRow
from autopar.search.solutions.crossed import Solved, about_crossed
from autopar.search.symbols.crossovers import Crossover

VALUES = {symbol("s0"): 8, symbol("s1"): 64}
S0, S1 = (Size(value, each, VALUES) for each, value in VALUES.items())

TEXT = """\
program explicit on dp=2 tp=2
sizes s0=8 s1=64
  x : f32[s0/dp s1 64/tp] = input
  w : f32[6 64/tp] = param('down.weight')
forward:
  view : f32[(s0/dp s1) 64/tp] = view(x, [{s0*s1}, 64])
  t : f32[64/tp 6] = t(w)
  mm : f32[(s0/dp s1) 6] +tp = mm(view, t)
  mm_tp : f32[(s0/dp s1) 6] = all_reduce(mm, tp)
  view_1 : f32[s0/dp s1 6] = view(mm_tp, [{s0}, {s1}, 6])
  places : i64[{s1 + 1}] = arange({s1 + 1})
  slice_1 : i64[{s1 - 1}] = slice.Tensor(places, 0, 0, {s1 - 1})
  return (view_1, slice_1)
"""

numbers = st.integers(1, 9)
leaves = st.sampled_from([S0, S1]) | numbers


def computed(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.builds(lambda a, b: a + b, parts, parts)
        | st.builds(lambda a, b: a * b, parts, parts)
        | st.builds(lambda a, b: a // b, parts, numbers)
        | st.builds(lambda a, b: a - b, parts, numbers)
        | st.builds(lambda a, b: a % b, parts, numbers)
    )


@given(st.recursive(leaves, computed, max_leaves=6), st.integers(2, 20), st.integers(2, 20))
def test_arithmetic_keeps_the_expression(size: int, a: int, b: int) -> None:
    """The text is that of the same expression, and its value at other sizes is computed with them."""
    if not isinstance(size, Size):
        return
    text = str(size).strip("{}")
    again = read_size(text, VALUES)
    assert isinstance(again, Size) and (int(again), again.expression) == (int(size), size.expression)
    other = AtValues({symbol("s0"): a, symbol("s1"): b})([size])
    assert other == [eval(text, {"s0": a, "s1": b})] and type(other[0]) is int
    assert size == int(size) and eval(text, {"s0": 8, "s1": 64}) == int(size)


def test_what_is_known_of_sizes() -> None:
    assert str(S0 * S1 * 2) == "2*s0*s1" and str(S0 + 1) == "{s0 + 1}" and str((S1 - 1) // 2) == "{(s1 - 1)//2}"
    assert S0 * S1 // S1 == S0 and repr(S0 * S1 // S1) == "{s0}"
    assert type(64 * S1 // S1) is int and math.prod((S0, S1)) == 512
    assert (gcd(S0 * S1, S0), gcd(S0, 4), gcd(64 * S0, 24)) == (8, 1, 8) and gcd(12, 18) == 6
    assert divides(2, 4 * S0) and not divides(2, S0) and divides(2, 8)
    assert hash(S0) != hash(8) and {8: "a"}.get(S0) is None and S0 == 8
    assert pickle.loads(pickle.dumps(S0 + S1)).expression == (S0 + S1).expression
    with pytest.raises(TypeError):
        S0 + "a"
    assert f"{S0:3d}" == "  8"


def test_a_program_with_symbols_prints_and_parses() -> None:
    program = Program.parse(TEXT)
    assert str(program) == TEXT and Program.parse(str(program)) == program
    assert {str(each): value for each, value in program.sizes.items()} == {"s0": 8, "s1": 64}
    program.verify()


@pytest.mark.parametrize(("batch", "length"), [(8, 64), (3, 100), (17, 7)])
def test_the_program_of_other_sizes(batch: int, length: int) -> None:
    program = Program.parse(TEXT).at_sizes(s0=batch, s1=length)
    program.verify()
    assert not program.sizes
    merged = f"{batch * length}/dp" if batch % 2 == 0 else f"({batch}/dp {length})"
    for line in (
        f"view : f32[{merged} 64/tp] = view(x, [{batch * length}, 64])",
        f"places : i64[{length + 1}] = arange({length + 1})",
        f"view_1 : f32[{batch}/dp {length} 6] = view(mm_tp, [{batch}, {length}, 6])",
    ):
        assert line in str(program)


def test_a_layout_with_symbols_stays_right_at_other_sizes() -> None:
    """8 and 64 could be merged; 3 and 64 could not, so the normal form keeps the parts."""
    mesh = Mesh(dp=2)
    parts = DistAttr((((S0, ("dp",)), (S1, ())),))
    assert parts.normalize((S0 * S1,), mesh) == parts
    assert DistAttr((((8, ("dp",)), (64, ())),)).normalize((512,), mesh) == DistAttr.split("dp")
    assert DistAttr((((4, ("dp",)), (S1, ())),)).normalize((4 * S1,), mesh) == DistAttr.split("dp")


def test_errors_name_the_size() -> None:
    program = Program.parse(TEXT)
    with pytest.raises(ValueError, match=r"^the program has no size 's2'; it has s0=8 s1=64$"):
        program.at_sizes(s2=3)
    with pytest.raises(ValueError, match="which is no whole number"):
        at_values(program, {symbol("s0"): 3})
    cases = {
        "program traced\n  x : f32[s0] = input\n": "line 2: there is no size 's0'; the sizes of the header are none",
        "program traced\nsizes s0=2\n  x : f32[{s0 : 2}] = input\n": "line 3: 's0 : 2' is no size",
        "program traced\nsizes s0=2\n  x : f32[{s0 +}] = input\n": "line 3: 's0 +' is no size",
        "program traced\nsizes s0=2 s0=3\n  x : f32[s0] = input\n": "line 2: the size s0 is named twice",
    }
    for text, said in cases.items():
        with pytest.raises(TextError) as caught:
            Program.parse(text)
        assert str(caught.value).startswith(said)


def test_the_guards_print_as_a_table() -> None:
    rows = [GuardRow("s1 <= 512", "model.py:8  x", 2, 1), GuardRow("dim 1 of x is 8", "", 0, 0)]
    printed = str(GuardReport.of(rows, 3, ["s0 is dim 0 of x: used for sizes 4 times"]))
    assert "s1 <= 512" in printed and "model.py:8" in printed
    assert (
        "captures: 3, of which 1 were made because a guard did not hold\ns0 is dim 0 of x: used for sizes 4 times\n"
        in printed
    )


def test_crossovers_that_sizes_are_beyond() -> None:
    solved = [Solved("batch", (Crossover(96.0, False),)), Solved("sequence", (Crossover(32.0, True),))]
    assert about_crossed(solved, {"batch": 64, "sequence": 64}) == []
    assert about_crossed(solved, {"batch": 128, "sequence": 16}) == [
        "the batch is 128, and from a batch of 96 on the plan that it was compared with is cheaper",
        "the sequence is 16, and up to a sequence of 32 the plan that it was compared with is cheaper",
    ]
    assert about_crossed(solved, {}) == []
