"""The price of a program: the sum of its ops and transfers, by hand; machines by name and file; what has no price."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import Mesh, Program, price
from autopar.costs.machine import Link, Machine, machine
from autopar.costs.op_prices import nanoseconds
from autopar.costs.prices import step_price
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.passes import pipeline, run_passes
from autopar.step.program import Step

# 1000 ns for an op and 1 ns for a byte, 4 operations a ns; 2000 ns for a message inside a node and 4 ns for a byte
PLAIN = Machine("plain", "any", 4, Link(2e-6, 0.25e9), Link(3e-6, 0.2e9), Link(1e-6, 1e9), (("f32", 4e9),))

TEXT = """program explicit on dp=2 tp=2
  x : f32[32/dp 64] = input
  up : f32[256/tp 64] = param
  down : f32[64 256/tp] = param
forward:
  t : f32[64 256/tp] = t(up)
  mm : f32[32/dp 256/tp] = mm(x, t)
  relu : f32[32/dp 256/tp] = relu(mm)
  t_1 : f32[256/tp 64] = t(down)
  mm_1 : f32[32/dp 64] +tp = mm(relu, t_1)
  mm_1_tp : f32[32/dp 64] = all_reduce(mm_1, tp)
  max_1 : (f32[32/dp], i64[32/dp]) = max.dim(mm_1_tp, 1)
  first : f32[32/dp] = max_1[0]
  sum_1 : f32[] +dp = sum(first)
backward:
  sum_1_dp : f32[] = all_reduce(sum_1, dp)
  half : f16[] = cast(sum_1_dp, f16)
  mm_1_dp : f32[32 64] = all_gather(mm_1_tp, 0, dp)
  return (half, mm_1_dp)
"""
OPS = {
    "mm": 1000 + 2 * 16 * 64 * 128 // 4 + 1000 + 2 * 16 * 128 * 64 // 4,
    "relu": 1000 + 2 * 4 * 16 * 128,
    "max.dim": 1000 + 4 * 16 * 64 + (4 + 8) * 16,
    "sum": 1000 + 4 * 16 + 4,
}
REDUCED = {"tp": 2000 + 4 * 4 * 16 * 64, "dp": 2000 + 4 * 4}  # each of two ranks sends all
GATHERED, CAST = 2000 + 4 * 4 * 32 * 64 // 2, 1000 + 4 + 2


def test_a_price_is_the_sum_of_ops_and_transfers() -> None:
    program = Program.parse(TEXT)
    program.verify()
    paid = price(program, PLAIN)
    assert paid.nanoseconds == sum(OPS.values()) + sum(REDUCED.values()) + GATHERED + CAST
    assert type(paid.nanoseconds) is int and paid.seconds == paid.nanoseconds / 1e9
    assert paid.by_op == {name: pytest.approx(cost / 1e9) for name, cost in {**OPS, "t": 0}.items()}
    assert paid.by_transfer == pytest.approx(
        {"all_reduce": sum(REDUCED.values()) / 1e9, "all_gather": GATHERED / 1e9, "cast": CAST / 1e9}
    )
    assert paid.by_axis == pytest.approx({"tp": REDUCED["tp"] / 1e9, "dp": (REDUCED["dp"] + GATHERED) / 1e9})
    late = REDUCED["dp"] + GATHERED + CAST
    assert paid.by_phase == pytest.approx({"forward": (paid.nanoseconds - late) / 1e9, "backward": late / 1e9})
    assert next(iter(paid.by_op)) == "mm" and paid.machine == "plain" and not paid.notes
    assert sum(row.times for row in paid.rows) == len([n for n in program.nodes if n.op == "call_function"]) - 1


def test_a_transfer_has_the_price_of_a_step() -> None:
    program = Program.parse(TEXT)
    moved = [node for node in program.nodes if node.target in transfers.BY_FUNCTION]
    steps = [
        nanoseconds(step_price(node.target, record_of(operands(node)[0]).type,
                               transfers.arguments(node.target, node.args, node.kwargs), record_of(node).type, PLAIN))
        for node in moved
    ]  # fmt: skip
    assert sum(steps) == sum(row.nanoseconds for row in price(program, PLAIN).rows if row.kind != "op")


def test_a_hidden_fraction_of_the_communication() -> None:
    program = Program.parse(TEXT)
    total, exchanged = price(program, PLAIN).nanoseconds, sum(REDUCED.values()) + GATHERED
    for overlap in (0, 0.25, 1.0):
        paid = price(program, PLAIN, overlap=overlap)
        assert paid.nanoseconds == total - round(overlap * exchanged)
        assert paid.by_axis == price(program, PLAIN).by_axis
    assert "25% of the communication hidden" in str(price(program, PLAIN, overlap=0.25))
    for wrong in (-0.1, 1.5, float("nan"), "all", True, None):
        with pytest.raises(ValueError, match=r"overlap=.* is no fraction; give a number from 0 to 1"):
            price(program, PLAIN, overlap=wrong)


def test_axes_are_written_together() -> None:
    text = """program explicit on dp=2 tp=2
  x : f32[8] +dp +tp = input
forward:
  x_dp_tp : f32[8] = all_reduce(x, (dp, tp))
  return x_dp_tp
"""
    assert list(price(Program.parse(text), PLAIN).by_axis) == ["dp tp"]


def test_stages_are_added_up_and_a_message_is_paid_where_it_is_received() -> None:
    text = """program explicit on pp=2 dp=2
stage s0 on dp=2
stage s1 on dp=2 ranks 2 3
  x : f32[6/dp 8] @s0 = input
forward:
  relu : f32[6/dp 8] @s0 = relu(x)
  relu_s1 : f32[6/dp 8] @s0 = send(relu, s1)
  relu_s1_s1 : f32[6/dp 8] @s1 = recv(relu_s1, s1, splits=((dp,), ()))
  exp : f32[6/dp 8] @s1 = exp(relu_s1_s1)
  return exp
"""
    program = Program.parse(text)
    program.verify()
    paid = price(program, PLAIN)
    own = 1000 + 2 * 4 * 3 * 8
    assert paid.nanoseconds == 2 * own + 2000 + 4 * 4 * 3 * 8
    assert not paid.by_axis and paid.by_transfer == pytest.approx({"recv": (2000 + 384) / 1e6 / 1e3, "send": 0})


def test_uneven_pieces_are_priced_as_the_largest() -> None:
    text = "program explicit on dp=4\n  x : f32[10/dp 8] = input\nforward:\n  y : f32[10/dp 8] = relu(x)\n  return y\n"
    assert price(Program.parse(text), PLAIN).nanoseconds == 1000 + 2 * 4 * 3 * 8


# -- steps -------------------------------------------------------------------------------------------------------------

STEP = """step of 3 micro-batches
count program explicit on dp=2
  y : f32[4/dp] = input
forward:
  sum_1 : f32[] +dp = sum(y)
  sum_1_dp : f32[] = all_reduce(sum_1, dp)
  return sum_1_dp

micro program explicit on dp=2
  w : f32[8] = param
  w_grad : f32[8] +dp = state(w_grad_sum, 'w.grad')
forward:
  neg : f32[8] +dp = neg(w_grad)
backward:
  w_grad_sum : f32[8] +dp = add.Tensor(w_grad, neg)

update program explicit on dp=2
  w : f32[8] = state(sub, 'w')
  w_grad : f32[8] +dp = buffer('w.grad')
update:
  w_grad_dp : f32[8] = all_reduce(w_grad, dp)
  sub : f32[8] = sub.Tensor(w, w_grad_dp)
"""


def test_the_price_of_a_step_is_that_of_micro_for_each_micro_batch() -> None:
    step = Step.parse(STEP)
    paid = price(step, PLAIN)
    parts = {name: price(program, PLAIN).nanoseconds for name, program in step.programs.items()}
    assert all(parts.values())
    assert paid.nanoseconds == parts["count"] + 3 * parts["micro"] + parts["update"]
    assert {row.name: row.times for row in paid.rows if row.kind == "op"} == {
        "neg": 3, "add.Tensor": 3, "sub.Tensor": 1, "sum": 1,
    }  # fmt: skip
    assert set(paid.by_phase) == {"forward", "backward", "update"}
    assert paid.by_transfer["all_reduce"] * 1e9 == pytest.approx(2000 + 16 + 2000 + 128)


# -- machines ----------------------------------------------------------------------------------------------------------


def test_a_machine_is_given_by_name_or_file(tmp_path: Path) -> None:
    program = Program.parse(TEXT)
    PLAIN.save(tmp_path / "plain.json")
    assert (
        price(program, tmp_path / "plain.json") == price(program, str(tmp_path / "plain.json")) == price(program, PLAIN)
    )
    assert price(program, "H100-SXM") == price(program, machine("NVIDIA H100 80GB HBM3"))
    with pytest.raises(ValueError, match="there is no machine 'H100'"):
        price(program, "H100")
    with pytest.raises(TypeError, match="None is no machine"):
        price(program, None)


def test_the_price_says_which_figures_are_not_the_machines() -> None:
    program = Program.parse(TEXT)
    none = price(program, replace(PLAIN, peak=(), note="a remark"))
    assert none.notes == ("a remark", "the peak of f32 is not known: 0.0 TFLOP/s, from the memory's bandwidth")
    assert str(none).endswith("\n".join(none.notes) + "\n")
    other = price(program, replace(PLAIN, peak=(("f64", 4e9),)))
    assert other.notes == ("the peak of f32 is not listed: that of f64 stands for it",)
    assert other.nanoseconds == price(program, PLAIN).nanoseconds
    assert price(program, "generic").notes[0].startswith("no particular device")


def test_a_price_prints_as_a_table() -> None:
    lines = str(price(Program.parse(TEXT), PLAIN)).splitlines()
    cells = [re.sub(r"\s+", " ", line.replace("│", "")).strip() for line in lines]
    assert cells[1].split("┃")[1:-1] == [" phase ", " op or transfer ", " axis ", " times ", " µs ", " of all "]
    relu = OPS["relu"] / 1e3
    share = OPS["relu"] / price(Program.parse(TEXT), PLAIN).nanoseconds
    assert f"forward relu 1 {relu:.1f} {share:.1%}" in cells
    assert f"backward all_reduce dp 1 {REDUCED['dp'] / 1e3:.1f}" in "\n".join(cells)
    assert not any(" t " in line for line in lines)  # views cost nothing
    assert lines[-1] == f"{price(Program.parse(TEXT), PLAIN).nanoseconds / 1e3:,.1f} µs on plain"


# -- what has no price -------------------------------------------------------------------------------------------------

PLACED = """program placed on dp=2
  x : f32[4/dp] = input
forward:
  relu : f32[4/dp] = relu(x)
  return relu
"""


def test_only_explicit_programs_have_a_price() -> None:
    placed = Program.parse(PLACED)
    explicit = Program.parse(PLACED.replace("placed", "explicit"))
    local = autopar.localize(explicit)[0]
    for program, remedy in (
        (Program.parse(PLACED.replace("placed", "traced")), r"run the passes over it, autopar\.passes\.run_passes"),
        (placed, r"run the reshard pass over it, autopar\.passes\.run_passes"),
        (local, "price the explicit program that it was made from"),
    ):
        with pytest.raises(
            ValueError, match=f"only explicit programs have a price, and this one is {program.level}: {remedy}"
        ):
            price(program, PLAIN)
    for wrong in (None, "program explicit", 3):
        with pytest.raises(TypeError, match="price takes an explicit program or a step of such programs, not"):
            price(wrong, PLAIN)


def test_the_remedies_lead_to_a_price() -> None:
    text = "program traced on dp=2\n  x : f32[4] = input\nforward:\n  relu : f32[4] = relu(x)\n  return relu\n"
    program: Any = Program.parse(text)
    run_passes(program, pipeline(Mesh(dp=2)))
    assert price(program, PLAIN).nanoseconds
    placed = Program.parse(PLACED)
    run_passes(placed, [autopar.passes.Reshard()])
    assert price(placed, PLAIN).nanoseconds == 1000 + 2 * 4 * 2
