"""What an op leaves each rank as its own: nothing moves it, and its backward alone reads it; copies are split alike."""

from __future__ import annotations

import pytest
from verified_programs import complaint

from autopar import Program
from autopar.passes import Pass, Place, Reshard, Search, run_passes
from autopar.rules.binding import split_of

ATTENTION = """\
program explicit on dp=2 tp=2
  seed : i64[] = seed
  q : f32[4/dp 2/tp 16 8] = input
  k : f32[4/dp 2/tp 16 8] = input
  v : f32[4/dp 2/tp 16 8] = input
  g : f32[4/dp 2/tp 16 8] = tangent(0)
forward:
  attention : (f32[4/dp 2/tp 16 8], f32[4/dp 2/tp 32], i64[], i64[]) = DRAWN(q, k, v, None, True, 0.1, seed=seed, \
stream=0)
  out : f32[4/dp 2/tp 16 8] = attention[0]
  rows : f32[4/dp 2/tp 32] = attention[1]
  philox : i64[] = attention[2]
  offset : i64[] = attention[3]
backward:
  gradients : (f32[4/dp 2/tp 16 8], f32[4/dp 2/tp 16 8], f32[4/dp 2/tp 16 8], None) = BACKWARD(g, q, k, v, None, out, \
rows, philox, offset, 0.1, [True, True, True, False])
  of_q : f32[4/dp 2/tp 16 8] = gradients[0]
  return out
  grad q = of_q
""".replace("DRAWN", "drawn::_scaled_dot_product_efficient_attention").replace(
    "BACKWARD", "_scaled_dot_product_efficient_attention_backward"
)
WHAT = (
    "philox is no data: drawn::_scaled_dot_product_efficient_attention leaves each rank its own (b h s! d!, b h t! "
    "d!, b h t! e!, (), () -> b h s! e!, b h rows!, own, own)"
)
MOVED = "nothing moves it: remove this transfer, and read philox itself"


def test_an_attention_with_its_backward_holds() -> None:
    Program.parse(ATTENTION).verify()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("  offset :", "  philox_dp : i64[] = all_reduce(philox, dp, op=max)\n  offset :", MOVED),
        ("  offset :", "  philox_dp : i64[] = cast(philox, i64)\n  offset :", MOVED),
        ("  offset :", "  philox_dp : i64[] +dp = pend(philox, dp)\n  offset :", MOVED),
        ("  offset :", "  one : i64[] = add.Tensor(philox, 1)\n  offset :",
         "which only its own backward reads; read another result of attention"),
        ("return out", "return (out, philox)", "so it has no global value: do not return it"),
    ],
)  # fmt: skip
def test_what_is_no_data_is_refused_elsewhere(old: str, new: str, why: str) -> None:
    assert old in ATTENTION
    said = complaint(ATTENTION.replace(old, new), "reshard")
    assert said.startswith("reshard left ") and WHAT in said and why in said
    assert "    philox : i64[] = attention[2]\n" in said


def test_what_is_no_data_waits_for_no_reduction() -> None:
    """It was a maximum that waits, and was reduced: NCCL has no numbers of the CPU."""
    waits = ATTENTION.replace("32], i64[], i64[])", "32], i64[] +max:dp, i64[])").replace(
        "philox : i64[]", "philox : i64[] +max:dp"
    )
    said = complaint(waits)
    assert "is reduced, not pending max over dp" in said


def test_a_backward_is_split_as_the_kernel_that_drew() -> None:
    text = ATTENTION.replace("g : f32[4/dp 2/tp 16 8] = tangent(0)", "g : f32[4/dp 2 16 8] = tangent(0)")
    forward, backward = text.split("backward:\n")
    gathers = "".join(
        f"  {name}_tp : f32[4/dp 2 {size}] = all_gather({name}, 1, tp)\n"
        for name, size in (("q", "16 8"), ("k", "16 8"), ("v", "16 8"), ("out", "16 8"), ("rows", "32"))
    )
    backward = backward.replace("g, q, k, v, None, out, rows", "g, q_tp, k_tp, v_tp, None, out_tp, rows_tp").replace(
        "2/tp 16 8]", "2 16 8]"
    ).replace("of_q : f32[4/dp 2 16 8] = gradients[0]\n",
              "of_q : f32[4/dp 2 16 8] = gradients[0]\n  of_q_tp : f32[4/dp 2/tp 16 8] = slice(of_q, 1, tp)\n"
              ).replace("grad q = of_q", "grad q = of_q_tp")  # fmt: skip
    said = complaint(f"{forward}backward:\n{gathers}{backward}")
    assert said.endswith(
        "it draws the random numbers of attention again, and these are others for other pieces: split both ops alike"
    )
    Program.parse(
        f"{forward}backward:\n{gathers}{backward}".replace("drawn::", "")
        .replace(", seed=seed, stream=0", "")
        .replace(", True, 0.1)", ", True)")
        .replace("offset, 0.1,", "offset, 0.0,")
    ).verify()


COPIES = """\
program traced on dp=2
  seed : i64[] = seed
  x : f32[4/dp 8] = input
  y : f32[4 8] = input
forward:
  mask : f32[4 8] = drawn::bernoulli.p(x, 0.5, seed=seed, stream=0)
  first : f32[4 8] = mul.Tensor(x, mask)
  mask_again : f32[4 8] = drawn::bernoulli.p(y, 0.5, seed=seed, stream=0)
  second : f32[4 8] = mul.Tensor(y, mask_again)
  return (first, second)
"""


@pytest.mark.parametrize("places", [Place(), Search()])
def test_a_copy_is_split_as_the_first(places: Pass) -> None:
    """Its own operand and reader are whole, or split along another dim."""
    for text in (COPIES, COPIES.replace("y : f32[4 8]", "y : f32[4 8/dp]")):
        program = Program.parse(text)
        run_passes(program, [places, Reshard()])
        masks = [program.node(name) for name in ("mask", "mask_again")]
        assert split_of(masks[0]) == split_of(masks[1])


def test_a_copy_that_is_split_otherwise_is_refused() -> None:
    program = """\
program explicit on dp=2
  seed : i64[] = seed
  x : f32[4/dp 8] = input
  y : f32[4 8] = input
forward:
  mask : f32[4/dp 8] = drawn::bernoulli.p(x, 0.5, seed=seed, stream=0)
  mask_again : f32[4 8] = drawn::bernoulli.p(y, 0.5, seed=seed, stream=0)
  return (mask, mask_again)
"""
    assert "it draws the random numbers of mask again" in complaint(program)
    Program.parse(program.replace("stream=0)\n  return", "stream=1)\n  return")).verify()
