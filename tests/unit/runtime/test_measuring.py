"""Operands of calls that are timed, and the clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autopar import Program
from autopar.ir.record import DTYPE_NAMES
from autopar.runtime.localize import localize
from autopar.runtime.measuring.clock import Clock, Effort
from autopar.runtime.measuring.operands import Operands
from autopar.runtime.measuring.ready import ready_compute

CPU = torch.device("cpu")


def local(lines: str, returned: str) -> Program:
    text = f"program explicit on dp=2\n{lines}  return {returned}\n"
    return localize(Program.parse(text), {"dp": 0})


def arguments(program: Program, name: str) -> list[torch.Tensor]:
    args, _ = Operands(CPU).of_call(program.node(name))
    return [value for value in args if isinstance(value, torch.Tensor)]


LOOK_UPS = [  # lines, the op, the position of its integers, the number that they are below
    ("  w : f32[40 4] = param\n  i : i64[64/dp 8] = input\n  found : f32[64/dp 8 4] = embedding(w, i)\n", 1, 40),
    ("  g : f32[64/dp 8 4] = input\n  i : i64[64/dp 8] = input\n"
     "  found : f32[40 4] +dp = embedding_dense_backward(g, i, 40, -1, False)\n", 1, 40),
    ("  x : f32[64/dp 30] = input\n  i : i64[64/dp 8] = input\n  found : f32[64/dp 8] = gather(x, 1, i)\n", 1, 30),
    ("  x : f32[30 64/dp] = input\n  i : i64[500] = input\n"
     "  found : f32[500 64/dp] = index_select(x, 0, i)\n", 1, 30),
    ("  x : f32[64/dp 30] = input\n  i : i64[64/dp] = input\n"
     "  found : (f32[64/dp], f32[]) = nll_loss_forward(x, i, None, 0, -100)\n", 1, 30),
    ("  x : f32[64/dp 8] = input\n  i : i64[500/dp 8] = input\n  found : i64[500/dp 8] = mul.Tensor(i, i)\n", 0, 2),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "position", "below"), LOOK_UPS)
def test_integers_are_below_the_size_of_what_they_look_up(lines: str, position: int, below: int) -> None:
    program = local(lines, "found")
    integers = arguments(program, "found")[position]
    assert int(integers.min()) >= 0 and below // 2 < int(integers.max()) + 1 <= below
    ready_compute(program, program.node("found"), Operands(CPU))()


def test_held_indices_ascend() -> None:
    program = local(
        "  w : f32[40/dp 4] = param\n  i : i64[64 8] = input\n  held : i64[40/dp] = input\n"
        "  found : f32[64 8 4] +dp = autopar::look_up(w, i, held, 40)\n",
        "found",
    )
    table, index, held = arguments(program, "found")
    assert table.shape == (20, 4) and held.tolist() == list(range(20)) and int(index.max()) > 20
    ready_compute(program, program.node("found"), Operands(CPU))()


def test_views_are_made_as_the_program_makes_them() -> None:
    program = local(
        "  x : f32[6/dp 8] = input\n  t : f32[8 6/dp] = t(x)\n  wide : f32[2 8 6/dp] = expand(t, [2, 8, 6])\n"
        "  found : f32[2 8 6/dp] = relu(wide)\n",
        "found",
    )
    (operand,) = arguments(program, "found")
    assert operand.shape == (2, 8, 3) and operand.stride() == (0, 1, 8)


def test_equal_operands_are_one_tensor() -> None:
    program = local("  x : f32[6/dp 8] = input\n  found : f32[6/dp 8] = mul.Tensor(x, x)\n", "found")
    first, second = arguments(program, "found")
    assert first is second


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "f8e4m3", "c64", "i64", "i32", "u8", "bool"])
def test_operands_of_each_dtype(dtype: str) -> None:
    program = local(f"  x : {dtype}[6/dp 8] = input\n  found : {dtype}[6/dp 8] = clone(x)\n", "found")
    (operand,) = arguments(program, "found")
    assert operand.shape == (3, 8) and DTYPE_NAMES[operand.dtype] == dtype
    if operand.dtype.is_floating_point:
        assert 0.5 <= float(operand.double().min()) <= float(operand.double().max()) <= 1.5


def test_an_update_writes_to_its_own_operands() -> None:
    program = local(
        "  w : f32[6/dp 8] = input\n  g : f32[6/dp 8] = input\n  lr : f64[] = input\n"
        "  found : f32[6/dp 8] = autopar::sgd(w, g, lr, None, None, weight_decay=0.0, maximize=False)\n",
        "found",
    )
    call = ready_compute(program, program.node("found"), Operands(CPU))
    (parameter,) = call.args[0]  # type: ignore[attr-defined]
    before = parameter.clone()
    call()
    assert parameter.shape == (3, 8) and not torch.equal(parameter, before)


# -- the clock ---------------------------------------------------------------------------------------------------------


class Steady(Clock):
    """Every call takes the same time."""

    taken = 0.01

    def each(self, call: Callable[[], object], count: int) -> list[float]:
        for _ in range(count):
            call()
        return [self.taken] * count


@pytest.mark.parametrize(("taken", "timed"), [(1e-6, 25), (0.01, 5), (10.0, 3), (0.0, 25)])
def test_a_call_is_timed_as_often_as_the_limit_allows(taken: float, timed: int) -> None:
    clock, calls = Steady(CPU, Effort(warm=2, seconds=0.05, least=3, most=25)), []
    clock.taken = taken
    assert clock.median(lambda: calls.append(1)) == taken
    assert len(calls) == 2 + 1 + timed


def test_an_effort_that_makes_no_sense_is_refused() -> None:
    for wrong in ({"least": 0}, {"least": 9, "most": 3}, {"seconds": float("nan")}, {"warm": -1}):
        with pytest.raises(ValueError, match="it takes 0 or more warm calls and seconds, and 1 ≤ least ≤ most"):
            Effort(**wrong)  # type: ignore[arg-type]


def test_seconds_are_those_of_this_process() -> None:
    assert len(Clock(CPU).each(lambda: None, 4)) == 4
    assert Clock(CPU).agreed([1.0, 2.0]) == [1.0, 2.0]


def test_endless_seconds_time_the_most_calls() -> None:
    assert Effort(seconds=float("inf"), most=7).calls(0.1) == 7
