"""The text of a call: equal calls have one text, and what changes the time of a call changes its text."""

from __future__ import annotations

from autopar import Program
from autopar.costs.calls import MOST_VIEWS, calls_of, kind_of, lies_by_sequence, views_behind
from autopar.ir.nodes import is_getitem

TEXT = """\
program explicit on dp=2 tp=4
  x : f32[8/dp 64] = input
  w : f32[128/tp 64] = param
  v : f32[64 128/tp] = param
  t : f32[64 128/tp] = t(w)
  mm : f32[8/dp 128/tp] = mm(x, t)
  view : f32[8/dp 1 128/tp] = view(mm, [8, 1, 128])
  view_1 : f32[8/dp 128/tp] = view(view, [8, 128])
  t_1 : f32[128/tp 64] = t(v)
  mm_1 : f32[8/dp 64] +tp = mm(view_1, t_1)
  mm_1_tp : f32[8/dp 64] = all_reduce(mm_1, tp)
  mm_2 : f32[8/dp 128/tp] = mm(x, v)
  sum_1 : f32[1 64] +dp = sum.dim_IntList(mm_1_tp, [0], True)
  sum_1_dp : f32[1 64/dp] = reduce_scatter(sum_1, 1, dp)
  split : (f32[8/dp 32], f32[8/dp 32]) = split_with_sizes(mm_1_tp, [32, 32], 1)
  piece : f32[8/dp 32] = split[1]
  relu : f32[8/dp 32] = relu(piece)
  half : bf16[8/dp 32] = cast(relu, bf16)
  return (half, sum_1_dp, mm_2)
"""


def texts(text: str = TEXT) -> dict[str, str]:
    return {node.name: call for node, call in calls_of(Program.parse(text))}


def test_calls_have_the_types_of_the_largest_pieces() -> None:
    found = texts()
    assert found["mm_2"] == "mm(f32[4 64], f32[64 32]) -> f32[4 32]"
    assert found["sum_1"] == "sum.dim_IntList(f32[4 64], [0], True) -> f32[1 64]"
    assert found["mm_1_tp"] == "all_reduce(f32[4 64], tp) -> f32[4 64]"
    assert found["sum_1_dp"] == "reduce_scatter(f32[1 64], 1, dp) -> f32[1 32]"
    assert found["half"] == "cast(f32[4 32], bf16) -> bf16[4 32]"
    assert found["view"] == "view(f32[4 32]) -> f32[4 1 32]", "sizes are those of types, and not of the whole value"


def test_uneven_pieces_count_as_the_first_one() -> None:
    found = texts(TEXT.replace("[8", "[9"))
    assert found["mm_2"] == "mm(f32[5 64], f32[64 32]) -> f32[5 32]"


def test_an_operand_says_the_views_that_reorder_it() -> None:
    found = texts()
    assert found["mm"] == "mm(f32[4 64], f32[64 32] by t of f32[32 64]) -> f32[4 32]"
    assert found["mm_1"] == "mm(f32[4 32], f32[32 64] by t of f32[64 32]) -> f32[4 64]", "a view in order says nothing"
    assert found["relu"] == "relu(f32[4 32] by split_with_sizes(1)[1] of f32[4 64]) -> f32[4 32]"


def test_results_of_an_attention_say_so() -> None:
    found = Program.parse("""\
program explicit on dp=2
  q : f32[4/dp 2 8 16] = input
  attention : (f32[4/dp 2 8 16], f32[4/dp 2 8]) = _scaled_dot_product_flash_attention_for_cpu(q, q, q)
  out : f32[4/dp 2 8 16] = attention[0]
  turned : f32[4/dp 8 2 16] = transpose.int(out, 1, 2)
  flat : f32[4/dp 8 32] = view(turned, [4, 8, 32])
  return flat
""")
    calls = {node.name: text for node, text in calls_of(found)}
    assert calls["turned"] == "transpose.int(f32[2 2 8 16] of an attention, 1, 2) -> f32[2 8 2 16]"
    assert calls["flat"].startswith("view(f32[2 8 2 16] by transpose.int(1, 2) of f32[2 2 8 16] of an attention)")
    assert lies_by_sequence(found.node("out")) and not lies_by_sequence(found.node("q"))


def test_elements_of_results_call_nothing_and_all_else_does() -> None:
    program = Program.parse(TEXT)
    named = {node.name for node in program.nodes if node.op == "call_function" and not is_getitem(node)}
    assert {node.name for node, _ in calls_of(program)} == named and "piece" not in named


def test_kinds() -> None:
    program = Program.parse(TEXT)
    kinds = {name: kind_of(program.node(name)) for name in ("mm", "mm_1_tp", "half")}
    assert kinds == {"mm": "op", "mm_1_tp": "exchange", "half": "local"}


def test_a_long_chain_of_views_is_cut() -> None:
    lines = [f"  t_{k + 1} : f32[4 4] = t(t_{k})" for k in range(40)]
    text = "\n".join(["program explicit on dp=2", "  t_0 : f32[4 4] = input", *lines, "  return t_40", ""])
    assert views_behind(Program.parse(text).node("t_40")) == MOST_VIEWS
    assert max(map(len, texts(text).values())) < 80
