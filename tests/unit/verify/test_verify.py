"""Verification: every promise has a program that breaks it, and the error says where, why, and what to do."""

from __future__ import annotations

import pytest
from verified_programs import LOCAL, MLP, PLACED, SCHEDULED, STATES, complaint

from autopar.ir.nodes import record_of, set_record
from autopar.ir.program import Program
from autopar.verify.levels import verify


def test_the_error_of_the_design() -> None:
    """Offending lines, the user's line, the rule, the remedy, against the pass that made it."""
    program = Program.parse("""\
program explicit on dp=4 tp=2
  x : f32[32/dp 64/tp] = input
  up : f32[64/tp 64] = param
forward:
  mm : f32[32/dp 64] +tp = mm(x, up)
  relu : f32[32/dp 64] = relu(mm)
  return relu
""")
    relu = program.node("relu")
    set_record(relu, record_of(relu)._replace(source="model.py:41  self.act(self.up(x))"))
    assert (
        complaint(program, "reshard")
        == """\
reshard left relu inconsistent
    mm : f32[32/dp 64] +tp = mm(x, up)
    relu : f32[32/dp 64] = relu(mm)          model.py:41  self.act(self.up(x))
  relu is not additive, so mm must be reduced over tp before it: insert all_reduce(mm, tp), or place mm differently"""
    )
    assert complaint(program).startswith("this explicit program is inconsistent at relu\n    mm : ")


def edited(old: str, new: str, text: str = MLP) -> str:
    assert old in text
    return text.replace(old, new)


# text → the exact error
BROKEN: dict[str, tuple[str, str]] = {
    "no mesh": (
        "program explicit\n",
        "this explicit program is inconsistent\n  a explicit program needs a mesh; the header names none",
    ),
    "local without coordinates": (
        "program local on dp=2\n",
        "this local program is inconsistent\n  local and scheduled programs, and no others, have the coordinates of "
        "one rank",
    ),
    "coordinates of an explicit program": (
        "program explicit on dp=2 at dp=0\n",
        "this explicit program is inconsistent\n  local and scheduled programs, and no others, have the coordinates "
        "of one rank",
    ),
    "coordinates outside the mesh": (
        "program local on dp=2 at dp=2\n",
        "this local program is inconsistent\n  coordinate dp=2 is outside the mesh (dp=2)",
    ),
    "coordinates of other axes": (
        "program local on dp=2 tp=2 at dp=0\n",
        "this local program is inconsistent\n  the coordinates need one index for each axis of the mesh (dp=2 tp=2)",
    ),
    "a value without type": (
        "program traced\n  x : None = input\n",
        "this traced program is inconsistent at x\n    x : None = input\n  every value has a type",
    ),
    "an element of another type": (
        PLACED + "  y : i64[4 6] = p[0]\n",
        "this placed program is inconsistent at y\n    p : (f32[4 6], i64[4 6]) = topk(x, 6)\n    y : i64[4 6] = "
        "p[0]\n  element 0 is f32[4 6]",
    ),
    "a transfer before reshard": (
        PLACED + "  x_dp : f32[4/dp 6] = slice(x, 0, dp)\n",
        "this placed program is inconsistent at x_dp\n    x_dp : f32[4/dp 6] = slice(x, 0, dp)\n  a placed program "
        "has no transfers; reshard inserts them",
    ),
    "a transfer before place": (
        "program traced\n  x : f32[4] = input\nforward:\n  y : bf16[4] = cast(x, bf16)\n",
        "this traced program is inconsistent at y\n    y : bf16[4] = cast(x, bf16)\n  a traced program has no "
        "transfers; reshard inserts them",
    ),
    "a constant in pieces": (
        "program placed on dp=2\n  c : f32[2/dp] = constant((1.0, 2.0))\n",
        "this placed program is inconsistent at c\n    c : f32[2/dp] = constant((1.0, 2.0))\n  a constant is whole on "
        "every rank, and its uses may need pieces of it",
    ),
    "undecided": (
        "program placed on dp=2\n  x : f32[4/?] = input\n",
        "this placed program is inconsistent at x\n    x : f32[4/?] = input\n  a dim is left undecided ('?'): place "
        "decides it",
    ),
    "an axis twice": (
        "program placed on dp=2\n  x : f32[4/dp 4/dp] = input\n",
        "this placed program is inconsistent at x\n    x : f32[4/dp 4/dp] = input\n  the axis dp is used twice on one "
        "value; each axis splits it, or is pending, once",
    ),
    "kinds of pending that do not commute": (
        "program placed on dp=2 tp=2\n  x : f32[4 4] +dp +max:tp = input\n",
        "this placed program is inconsistent at x\n    x : f32[4 4] +dp +max:tp = input\n"
        "  pending sum over dp and max over tp at once: the order of the reductions would matter; reduce one first",
    ),
    "a required axis twice": (
        PLACED + "  y : f32[4 6] = relu(x as [4/dp 6] +dp)\n",
        "this placed program is inconsistent at y\n    y : f32[4 6] = relu(x as [4/dp 6] +dp)\n  the axis dp is used "
        "twice on one value; each axis splits it, or is pending, once",
    ),
    "a result that does not follow": (
        edited("relu : f32[32/dp 256/tp] =", "relu : f32[32 256/tp] ="),
        "this explicit program is inconsistent at relu\n    mm : f32[32/dp 256/tp] = mm(x, up)\n    relu : f32[32 "
        "256/tp] = relu(mm)\n"
        "  relu splits the factor ...1 (... -> ...) over dp in one place and over no axis in the result: place them "
        "alike",
    ),
    "a result that is not marked pending": (
        edited("mm_1 : f32[32/dp 64] +tp", "mm_1 : f32[32/dp 64]"),
        "this explicit program is inconsistent at mm_1\n    relu : f32[32/dp 256/tp] = relu(mm)\n    down : "
        "f32[256/tp 64] = param\n    mm_1 : f32[32/dp 64] = mm(relu, down)\n"
        "  the result of mm (m k, k n -> m n) is pending sum over tp, not reduced",
    ),
    "a transfer that does not apply": (
        edited("all_reduce(mm_1, tp)", "all_reduce(relu, tp)").replace("mm_1_tp : f32[32/dp 64]",
            "mm_1_tp : f32[32/dp 256]"),
        "this explicit program is inconsistent at mm_1_tp\n    relu : f32[32/dp 256/tp] = relu(mm)\n    mm_1_tp : "
        "f32[32/dp 256] = all_reduce(relu, tp)\n"
        "  the value is not pending sum over tp",
    ),
    "a transfer of another type": (
        edited("mm_1_tp : f32[32/dp 64]", "mm_1_tp : f32[32 64]"),
        "this explicit program is inconsistent at mm_1_tp\n    mm_1 : f32[32/dp 64] +tp = mm(relu, down)\n    mm_1_tp "
        ": f32[32 64] = all_reduce(mm_1, tp)\n"
        "  all_reduce makes it f32[32/dp 64]",
    ),
    "a use that disagrees": (
        edited("mm(relu, down)", "mm(relu as [32 256/tp], down)").replace("mm_1 : f32[32/dp 64]", "mm_1 : f32[32 64]"),
        "this explicit program is inconsistent at mm_1\n    relu : f32[32/dp 256/tp] = relu(mm)\n    mm_1 : f32[32 "
        "64] +tp = mm(relu as [32 256/tp], down)\n"
        "  mm_1 needs relu as [32 256/tp], but it is f32[32/dp 256/tp]: insert the transfers between them",
    ),
    "another dtype": (
        edited("relu(mm)", "relu(mm as bf16[32/dp 256/tp])"),
        "this explicit program is inconsistent at relu\n    mm : f32[32/dp 256/tp] = mm(x, up)\n    relu : f32[32/dp "
        "256/tp] = relu(mm as bf16[32/dp 256/tp])\n"
        "  relu needs mm as bf16[32/dp 256/tp], but it is f32[32/dp 256/tp]: insert the transfers between them",
    ),
    "a result that disagrees": (
        edited("return mm_1_tp", "return mm_1_tp as [32 64]"),
        "this explicit program is inconsistent at output\n    mm_1_tp : f32[32/dp 64] = all_reduce(mm_1, tp)\n"
        "  the output needs mm_1_tp as [32 64], but it is f32[32/dp 64]: insert the transfers between them",
    ),
    "two meshes": (
        "program placed on dp=2 tp=2\nstage s on dp=2 ranks 2 3\n  x : f32[4/tp 6] = input\nforward:\n  y : f32[4 6] "
        "@s = relu(x)\n",
        "this placed program is inconsistent at y\n    x : f32[4/tp 6] = input\n    y : f32[4 6] @s = relu(x)\n  "
        "operands and results are on different meshes; an op runs on one: insert a send and a recv",
    ),
    "streams before they are scheduled": (
        "program local on dp=2 at dp=0\n  x : f32[2] = input\nforward:\n  x_dp : f32[2] = start all_reduce(x, dp)\n",
        "this local program is inconsistent at x_dp\n    x_dp : f32[2] = start all_reduce(x, dp)\n  a local program "
        "has no streams; only a scheduled one starts and waits",
    ),
    "waiting before it is scheduled": (
        "program local on dp=2 at dp=0\n  x : f32[2] = input\nforward:\n  y : f32[2] = wait(x)\n",
        "this local program is inconsistent at y\n    y : f32[2] = wait(x)\n  a local program has no streams; only a "
        "scheduled one starts and waits",
    ),
    "a stream before it is scheduled": (
        "program traced\n  x : f32[2] = input on comm\n",
        "this traced program is inconsistent at x\n    x : f32[2] = input on comm\n  a traced program has no streams; "
        "only a scheduled one starts and waits",
    ),
    "no such axis at the level local": (
        LOCAL + "  z : f32[2 4] = all_reduce(x, pp)\n",
        "this local program is inconsistent at z\n    z : f32[2 4] = all_reduce(x, pp)\n  the mesh (dp=2 tp=2) has no "
        "axis 'pp'; its axes are dp, tp; did you mean 'tp'?",
    ),
    "too many pieces": (
        LOCAL + "  z : f32[2 2] = slice(x, 1, tp, sizes=[2, 1, 1])\n",
        "this local program is inconsistent at z\n    z : f32[2 2] = slice(x, 1, tp, sizes=[2, 1, 1])\n  sizes lists "
        "3 pieces, the axis tp has 2",
    ),
    "too few new pieces": (
        LOCAL + "  z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2], new_sizes=[2])\n",
        "this local program is inconsistent at z\n    z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2], "
        "new_sizes=[2])\n  new_sizes lists 1 pieces, the axis dp has 2",
    ),
    "no pieces": (
        LOCAL + "  z : f32[2 2] = slice(x, 1, tp)\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 2] = slice(x, 1, tp)\n  at "
        "the level local it needs an argument sizes with the sizes of the pieces",
    ),
    "no new pieces": (
        LOCAL + "  z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[4 2] = all_to_all(x, 0, 1, "
        "dp, sizes=[2, 2])\n  at the level local it needs an argument new_sizes with the sizes of the pieces",
    ),
    "pieces of another result": (
        LOCAL + "  z : f32[2 3] = slice(x, 1, tp, sizes=[2, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 3] = slice(x, 1, tp, "
        "sizes=[2, 2])\n  its result is [2, 2]",
    ),
    "another shape without pieces": (
        LOCAL + "  z : f32[2 3] = all_reduce(x, tp)\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 3] = all_reduce(x, tp)\n  "
        "its result is [2, 4]",
    ),
    "pieces of another operand: slice": (
        LOCAL + "  z : f32[2 3] = slice(x, 1, tp, sizes=[3, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 3] = slice(x, 1, tp, "
        "sizes=[3, 2])\n  its piece sizes need an operand with 5 in dim 1, but x has 4",
    ),
    "pieces of another operand: gather": (
        LOCAL + "  z : f32[5 4] = all_gather(x, 0, dp, sizes=[2, 3])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[5 4] = all_gather(x, 0, dp, "
        "sizes=[2, 3])\n  its piece sizes need an operand with 3 in dim 0, but x has 2",
    ),
    "pieces of another operand: all-to-all, the dim that is joined": (
        LOCAL + "  z : f32[5 2] = all_to_all(x, 0, 1, dp, sizes=[2, 3], new_sizes=[2, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[5 2] = all_to_all(x, 0, 1, "
        "dp, sizes=[2, 3], new_sizes=[2, 2])\n"
        "  its piece sizes need an operand with 3 in dim 0, but x has 2",
    ),
    "pieces of another operand: all-to-all, the dim that is split": (
        LOCAL + "  z : f32[4 2] = all_to_all(x, 0, 1, dp, sizes=[2, 2], new_sizes=[3, 2])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[4 2] = all_to_all(x, 0, 1, "
        "dp, sizes=[2, 2], new_sizes=[3, 2])\n"
        "  its piece sizes need an operand with 5 in dim 1, but x has 4",
    ),
    "pieces of no dim": (
        LOCAL + "  z : f32[2 4] = slice(x, 2, tp, sizes=[1, 1])\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : f32[2 4] = slice(x, 2, tp, "
        "sizes=[1, 1])\n  there is no dim 2 in a value of 2",
    ),
    "a transfer to several tensors": (
        LOCAL + "  z : (f32[2 4], f32[2 4]) = all_reduce(x, tp)\n",
        "this local program is inconsistent at z\n    x : f32[2 4] = input\n    z : (f32[2 4], f32[2 4]) = "
        "all_reduce(x, tp)\n  all_reduce takes one tensor and makes one",
    ),
    "no such stream": (
        edited("on comm", "on compute", SCHEDULED),
        "this scheduled program is inconsistent at x_dp\n    x_dp : f32[2 4] = start all_reduce(x, dp) on compute\n  "
        "no stream 'compute'; streams are comm",
    ),
    "no streams": (
        edited("stream comm\n", "", SCHEDULED),
        "this scheduled program is inconsistent at x_dp\n    x_dp : f32[2 4] = start all_reduce(x, dp) on comm\n  no "
        "stream 'comm'; streams are none",
    ),
    "starting what is no collective": (
        edited("relu(x)", "start relu(x)", SCHEDULED),
        "this scheduled program is inconsistent at y\n    y : f32[2 4] = start relu(x)\n  only a collective can be "
        "started and waited for",
    ),
    "reading what is only started": (
        edited("relu(x)", "relu(x_dp)", SCHEDULED),
        "this scheduled program is inconsistent at y\n    x_dp : f32[2 4] = start all_reduce(x, dp) on comm\n    y : "
        "f32[2 4] = relu(x_dp)\n  x_dp is only started here: read wait(x_dp)",
    ),
    "returning what is only started": (
        edited("return wait", "return x_dp", SCHEDULED),
        "this scheduled program is inconsistent at output\n    x_dp : f32[2 4] = start all_reduce(x, dp) on comm\n  "
        "x_dp is only started here: return wait(x_dp)",
    ),
    "waiting for what is not started": (
        edited("wait(x_dp)", "wait(y)", SCHEDULED),
        "this scheduled program is inconsistent at wait\n    y : f32[2 4] = relu(x)\n    wait : f32[2 4] = wait(y)\n  "
        "y is not started: read it without waiting",
    ),
    "never waiting": (
        edited("  wait : f32[2 4] = wait(x_dp)\n  return wait\n", "", SCHEDULED),
        "this scheduled program is inconsistent at x_dp\n    x_dp : f32[2 4] = start all_reduce(x, dp) on comm\n  "
        "x_dp is started and never waited for: insert wait(x_dp)",
    ),
    "a gradient of another shape": (
        edited("x : f32[4] =", "x : f32[5] =", STATES),
        "this explicit program is inconsistent at output\n    x : f32[5] = input\n    b : f32[4] = state(d)\n  b is "
        "the grad of x and has another shape",
    ),
    "a state of another shape": (
        edited("b : f32[4] = state(d)", "b : f32[5] = state(d)", STATES).replace("  d : f32[4] = relu(b)",
            "  d : f32[4] = relu(x)").replace("grad x = b", "grad x = x"),
        "this explicit program is inconsistent at output\n    b : f32[5] = state(d)\n    d : f32[4] = relu(x)\n  d is "
        "the state of b and has another shape",
    ),
    "a state that lies elsewhere afterwards": (
        edited("a : f32[4/dp] = state(c)", "a : f32[4/dp] = state(d)", STATES),
        "this explicit program is inconsistent at output\n    a : f32[4/dp] = state(d)\n    d : f32[4] = relu(b)\n  a "
        "and its next value must have the same Layout: require d as f32[4/dp]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_what_breaks_a_promise_is_reported(what: str) -> None:
    text, message = BROKEN[what]
    assert complaint(text) == message


@pytest.mark.parametrize("text", [MLP, SCHEDULED, STATES, LOCAL], ids=["explicit", "scheduled", "states", "local"])
def test_what_keeps_its_promises_is_not(text: str) -> None:
    """``verify`` raises nothing."""
    verify(Program.parse(text))


def test_an_op_that_needs_all_whole() -> None:
    """All of it is whole, and nothing else."""
    verify(Program.parse(PLACED + "  y : f32[5] = histc(x, 5)\n"))
    told = complaint(PLACED + "  y : f32[5] = histc(x as [4 6/tp], 5)\n")
    assert told == (
        "this placed program is inconsistent at y\n    x : f32[4 6] = input\n    y : f32[5] = histc(x as [4 6/tp], 5)\n"
        "  histc needs the factor a1 whole (a0! a1! -> bins!), but x is split along it over tp: gather it first"
    )


def test_every_pass_is_named() -> None:
    assert complaint("program explicit\n", "reshard").startswith("reshard left the program inconsistent\n")
    assert complaint(BROKEN["no such stream"][0], "schedule").startswith("schedule left x_dp inconsistent\n    x_dp : ")


@pytest.mark.parametrize(
    ("forward", "backward", "told"),
    [
        ("  y : f32[4] = relu(d)\n", "", "y is part of the forward and reads d, which is part of the backward"),
        (
            "",
            "  z : f32[4] = relu(d)\nforward:\n  y : f32[4] = relu(z)\n",
            "y is part of the forward and reads z, which is part of the backward",
        ),
    ],
)
def test_no_phase_reads_what_a_later_one_makes(forward: str, backward: str, told: str) -> None:
    text = (
        f"program placed on dp=2 tp=2\n  x : f32[4] = input\n  d : f32[4] = "
        f"tangent(0)\nforward:\n{forward}backward:\n{backward}  return x\n"
    )
    assert complaint(text).endswith(told)
