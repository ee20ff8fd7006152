"""What a stage's update computes before the numbers of all stages are known, and what behind."""

from __future__ import annotations

from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.passes import run_passes
from autopar.passes.split_update import FIRST, SplitUpdate
from autopar.scheduling.programs.functions import functions_of

TEXT = """\
program explicit on tp=2
  w : f32[8/tp 4] = state(w_next)
  w_grad : f32[8/tp 4] = buffer('w.grad')
  loss_1 : f32[] = buffer('.loss')
  all : f32[] = input('.squares')
  steps : f32[] = state(steps_next, '.step.0')
update:
  doubled : f32[8/tp 4] = mul.Scalar(w_grad, 2.0)
  squared : f32[8/tp 4] = mul.Tensor(doubled, doubled)
  sum_1 : f32[] +tp = sum(squared)
  squares : f32[] = all_reduce(sum_1, tp)
  steps_next : f32[] = add.Tensor(steps, 1)
  norm : f32[] = sqrt(all)
  clipped : f32[8/tp 4] = div.Tensor(doubled, norm)
  w_next : f32[8/tp 4] = sub.Tensor(w, clipped)
  return (loss_1, squares, norm)
""".replace(" all : ", " every : ").replace("sqrt(all)", "sqrt(every)")


def split(text: str) -> Program:
    program = Program.parse(text)
    run_passes(program, [SplitUpdate()])
    program.verify()
    assert Program.parse(str(program)) == program
    return program


def phases(program: Program) -> dict[str, str]:
    return {node.name: record_of(node).phase for node in program.nodes if node.op == "call_function"}


def test_what_comes_first() -> None:
    """What a number for the others is made of, with its transfers. A counter of steps is none, nor is the norm, which
    follows from the numbers of all stages."""
    assert phases(split(TEXT)) == {
        "doubled": FIRST, "squared": FIRST, "sum_1": FIRST, "squares": FIRST, "steps_next": "update", "norm": "update",
        "clipped": "update", "w_next": "update",
    }  # fmt: skip


def test_both_are_functions() -> None:
    """The first gives the second what it reads, and takes no number of the others."""
    first, second = functions_of(split(TEXT), whole=False)
    assert [function.phases for function in (first, second)] == [(FIRST,), ("update",)]
    assert [node.name for node in first.takes] == ["w_grad", "loss_1"]
    assert {node.name for node in first.gives} == {"loss_1", "squares", "doubled"}
    assert "every" in {node.name for node in second.takes}
    assert {node.name for node in second.gives} == {"norm", "w_next", "steps_next"}


def test_without_numbers_nothing_comes_first() -> None:
    text = TEXT.replace("  return (loss_1, squares, norm)\n", "  return (loss_1, norm)\n")
    assert set(phases(split(text)).values()) == {"update"}


def test_measured_norms_are_of_all_stages_too() -> None:
    text = TEXT.replace("'.squares'", "'.measured'")
    assert phases(split(text))["norm"] == "update"
    other = TEXT.replace("'.squares'", "'.other'")
    assert phases(split(other))["norm"] == FIRST, "a number that is this stage's own"
