"""Which ops of a stage's backward are computed apart, as weight gradients."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import VerifyError
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.passes import run_passes
from autopar.passes.split_backward import APART, SplitBackward, weight_gradients
from autopar.scheduling.programs.functions import functions_of

# a linear layer between two stages, and a norm whose gradients have one op in common
MIDDLE = """\
program explicit on tp=2
  x : f32[8 4] = input
  w : f32[4 4] = param
  g : f32[4] = param
  w_grad : f32[4 4] = state(w_grad_sum, 'w.grad')
  g_grad : f32[4] = state(g_grad_sum, 'g.grad')
  d_y : f32[8 4] = tangent(0)
forward:
  y : f32[8 4] = mm(x, w)
backward:
  t : f32[4 8] = t(x)
  mm_1 : f32[4 4] = mm(t, d_y)
  w_grad_sum : f32[4 4] = add.Tensor(w_grad, mm_1)
  tanh : f32[8 4] = tanh(d_y)
  d_g : f32[4] = sum.dim_IntList(tanh, [0])
  g_grad_sum : f32[4] = add.Tensor(g_grad, d_g)
  u : f32[4 4] = t(w)
  d_x : f32[8 4] = mm(tanh, u)
  return y
  grad x = d_x
"""


def program_of(text: str) -> Program:
    program = Program.parse(text)
    program.verify()
    return program


def apart(text: str) -> list[str]:
    return [node.name for node in weight_gradients(program_of(text))]


def test_what_the_boundary_needs_stays() -> None:
    """tanh leads to a gradient that is sent, and to one of a parameter."""
    assert apart(MIDDLE) == ["t", "mm_1", "w_grad_sum", "d_g", "g_grad_sum"]


FIRST = MIDDLE.replace("  grad x = d_x\n", "").replace("  u : f32[4 4] = t(w)\n  d_x : f32[8 4] = mm(tanh, u)\n", "")


def test_what_leads_to_two_gradients_stays() -> None:
    """On the first stage, which sends no gradient."""
    text = FIRST.replace("  tanh : f32[8 4] = tanh(d_y)\n", "")
    text = text.replace("  t : f32[4 8] = t(x)\n", "  t : f32[4 8] = t(x)\n  tanh : f32[8 4] = tanh(d_y)\n")
    assert apart(text) == ["t", "tanh", "mm_1", "w_grad_sum", "d_g", "g_grad_sum"], "tanh leads to one alone"
    assert apart(text.replace("mm(t, d_y)", "mm(t, tanh)")) == ["t", "mm_1", "w_grad_sum", "d_g", "g_grad_sum"]


def test_an_addition_of_what_stays_stays() -> None:
    """Else what is added would be kept for it."""
    text = MIDDLE.replace("mm_1 : f32[4 4] = mm(t, d_y)", "mm_1 : f32[4 4] = mm(t, tanh)").replace(
        "  d_x : f32[8 4] = mm(tanh, u)", "  d_x : f32[8 4] = mm(tanh, mm_1)"
    )
    text = text.replace("  tanh : f32[8 4] = tanh(d_y)\n", "").replace(
        "  t : f32[4 8] = t(x)\n", "  tanh : f32[8 4] = tanh(d_y)\n  t : f32[4 8] = t(x)\n"
    )
    text = text.replace("  u : f32[4 4] = t(w)\n", "")
    assert apart(text) == ["d_g", "g_grad_sum"]


def test_the_pass_moves_them_to_a_phase_of_their_own() -> None:
    program = program_of(MIDDLE)
    (report,) = run_passes(program, [SplitBackward()])
    assert report.name == "split_backward"
    text = str(program)
    assert Program.parse(text) == program
    made = {node.name: record_of(node).phase for node in program.nodes if node.op == "call_function"}
    assert made == {
        "y": "forward", "t": APART, "mm_1": APART, "w_grad_sum": APART, "tanh": "backward", "d_g": APART,
        "g_grad_sum": APART, "u": "backward", "d_x": "backward",
    }  # fmt: skip
    assert [node.name for node in operands(program.output)] == [n.name for n in operands(program_of(MIDDLE).output)]


def test_phases_are_functions() -> None:
    """The backward returns what the weight gradients read, and takes no sum."""
    program = program_of(MIDDLE)
    run_passes(program, [SplitBackward()])
    forward, backward, weights = functions_of(program, whole=False)
    assert [function.phases for function in (forward, backward, weights)] == [("forward",), ("backward",), (APART,)]
    assert [node.name for node in backward.takes] == ["d_y", "w"]
    assert {node.name for node in backward.gives} == {"d_x", "tanh"}
    assert [node.name for node in weights.takes] == ["x", "d_y", "w_grad", "tanh", "g_grad"]
    assert [node.name for node in weights.gives] == ["w_grad_sum", "g_grad_sum"]


def test_nothing_of_a_backward_may_read_a_weight_gradient() -> None:
    """The rule of phases: what is computed later is not there."""
    program = program_of(MIDDLE)
    with program.edit() as edit:
        edit.annotate(next(node for node in program.nodes if node.name == "tanh"), phase=APART)
    with pytest.raises(
        VerifyError, match="d_g is part of the backward and reads tanh, which is part of the weight_gradients"
    ):
        program.verify()


@st.composite
def backwards(draw: st.DrawFn) -> str:
    """A random backward: additions of earlier values, some of which are sums or are sent."""
    count, parameters = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    lines, values = [], ["d_y", "x"]
    for k in range(count):
        lines.append(f"  v{k} : f32[4] = mul.Tensor({draw(st.sampled_from(values))}, {draw(st.sampled_from(values))})")
        values.append(f"v{k}")
    states = ""
    for k in range(parameters):
        states += f"  p{k}_grad : f32[4] = state(p{k}_grad_sum, 'p{k}.grad')\n"
        lines.append(f"  p{k}_grad_sum : f32[4] = add.Tensor(p{k}_grad, {draw(st.sampled_from(values))})")
    sent = f"  grad x = {draw(st.sampled_from(values[2:]))}\n" if draw(st.booleans()) else ""
    return (
        f"program explicit on tp=2\n  x : f32[4] = input\n{states}  d_y : f32[4] = tangent(0)\nforward:\n"
        f"  y : f32[4] = tanh(x)\nbackward:\n" + "\n".join(lines) + f"\n  return y\n{sent}"
    )


@settings(deadline=None)
@given(text=backwards())
def test_the_rule(text: str) -> None:
    """An op is apart if all paths from it end in one sum, but for the addition of a value that stays."""
    program = program_of(text)
    rows = list(zip(operands(program.output), record_of(program.output).results, strict=True))

    def ends(node) -> set[str]:
        found = {f"{result.kind} {result.of}" for value, result in rows if value is node}
        return found.union(*(ends(user) for user in node.users if user.op != "output")) or {"nothing"}

    ops = [n for n in program.nodes if n.op == "call_function" and record_of(n).phase == "backward"]
    wanted = [n for n in ops if len(ends(n)) == 1 and next(iter(ends(n))).startswith("state")]
    kept = [n for n in wanted if not n.name.endswith("_sum") or any(value in wanted for value in operands(n))]
    assert weight_gradients(program) == kept
