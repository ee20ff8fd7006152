"""A gradient is taken apart into what each stage makes of it, and the parts add up to it."""

from __future__ import annotations

import re

import pytest
import torch
from pipelined_programs import assigned, node_of, random_values, read, run_stages, run_whole, stages_of

from autopar.step.pipelined.cutting.gradient_parts import Part, gradient_parts

HEAD = """\
program traced
  w : f32[4 4] = param
  x : f32[2 4] = input
  w_grad : f32[4 4] = state(w_grad_sum, 'w.grad')
  loss : f32[] = state(loss_sum, '.loss')
forward:
  mm : f32[2 4] = mm(x, w)
  mm_1 : f32[2 4] = mm(mm, w)
  mm_2 : f32[2 4] = mm(mm_1, w)
  sum_1 : f32[] = sum(mm_2)
  loss_sum : f32[] = add.Tensor(loss, sum_1)
backward:
  d : f32[2 4] = mul.Tensor(mm_2, 2.0)
  c : f32[4 2] = t(mm_1)
  gc : f32[4 4] = mm(c, d)
  b : f32[4 2] = t(mm)
  gb : f32[4 4] = mm(b, d)
  d_x : f32[2 4] = mul.Tensor(d, 2.0)
  a : f32[4 2] = t(x)
  ga : f32[4 4] = mm(a, d_x)
"""
LAST = "  w_grad_sum : f32[4 4] = add.Tensor(w_grad, {})\n"
STAGES = {
    "mm": 0,
    "mm_1": 1,
    "mm_2": 2,
    "sum_1": 2,
    "loss_sum": 2,
    "d": 2,
    "c": 2,
    "gc": 2,
    "b": 1,
    "gb": 1,
    "d_x": 0,
    "ga": 0,
}

# the sum of the gradients → what each stage adds, and the ops that no stage runs as a whole
CASES = {
    "a tree": (
        ["cb : f32[4 4] = add.Tensor(gc, gb)", "whole : f32[4 4] = add.Tensor(cb, ga)"],
        {0: "ga", 1: "gb", 2: "gc"}, "cb whole",
    ),
    "two of one stage": (
        ["other : f32[4 4] = mul.Tensor(gc, 2.0)", "cc : f32[4 4] = add.Tensor(gb, other)",
         "whole : f32[4 4] = add.Tensor(cc, gc_1)"],
        {1: "gb", 2: "whole(other, gc_1)"}, "cc whole",
    ),
    "of one stage": (
        ["other : f32[4 4] = mul.Tensor(gc, 2.0)", "whole : f32[4 4] = add.Tensor(other, gc)"],
        {2: "whole"}, "",
    ),
    "a cast of a sum": (
        ["cb : f32[4 4] = add.Tensor(gc, gb)", "low : bf16[4 4] = _to_copy(cb, dtype=bf16)",
         "whole : f32[4 4] = _to_copy(low, dtype=f32)"],
        {1: "whole(low(gb))", 2: "whole(low(gc))"}, "cb low whole",
    ),
    "a view of a sum": (
        ["cb : f32[4 4] = add.Tensor(gc, gb)", "whole : f32[4 4] = t(cb)"],
        {1: "whole(gb)", 2: "whole(gc)"}, "cb whole",
    ),
    "views are added": (
        ["v : f32[4 4] = t(gc)", "u : f32[4 4] = t(gb)", "whole : f32[4 4] = add.Tensor(v, u)"],
        {1: "u", 2: "v"}, "whole",
    ),
    "a scaled sum": (  # another op needs the whole
        ["cb : f32[4 4] = add.Tensor(gc, gb)", "whole : f32[4 4] = mul.Tensor(cb, 0.5)"],
        {1: "whole"}, "",
    ),
    "a sum with a factor": (
        ["whole : f32[4 4] = add.Tensor(gc, gb, alpha=2)"],
        {1: "whole"}, "",
    ),
    "a sum that others read": (
        ["cb : f32[4 4] = add.Tensor(gc, gb)", "more : f32[4 4] = mul.Tensor(cb, 2.0)",
         "ga_1 : f32[4 4] = mul.Tensor(ga, more)", "whole : f32[4 4] = add.Tensor(cb, ga_1)"],
        {0: "ga_1", 1: "cb"}, "whole",
    ),
    "doubled": (
        ["whole : f32[4 4] = add.Tensor(gc, gc)"],
        {2: "whole"}, "",
    ),
}  # fmt: skip


def text_of(name: str) -> tuple[str, dict[str, int]]:
    """A program whose gradient is made in this way, and its stages."""
    lines, _, _ = CASES[name]
    # what no stage runs as a whole has a stage too: that of its last operand
    stages = dict(STAGES)
    if name == "two of one stage":
        lines = ["gc_1 : f32[4 4] = mul.Tensor(gc, 3.0)", *lines]
        stages["gc_1"] = 2
    for line in lines:
        made, read_values = line.split(" : ")[0], re.findall(r"\w+", line.partition("(")[2])
        stages[made] = min(stages[value] for value in read_values if value in stages)
    stages["w_grad_sum"] = stages["whole"]
    return HEAD + "".join(f"  {line}\n" for line in lines) + LAST.format("whole"), stages


def written(part: Part) -> str:
    return part.node.name + (f"({', '.join(map(written, part.of))})" if part.of else "")


@pytest.mark.parametrize("name", CASES)
def test_parts(name: str) -> None:
    _, wanted, gone = CASES[name]
    text, stages = text_of(name)
    program = read(text)
    dissolved: set = set()
    found = gradient_parts(node_of(program, "whole"), assigned(program, stages).stage, dissolved)
    assert {stage: written(part) for stage, part in found.items()} == wanted
    assert sorted(node.name for node in dissolved) == sorted(gone.split())


@pytest.mark.parametrize("name", CASES)
def test_their_sum_is_the_gradient(name: str) -> None:
    """The programs of the stages, run one after the other, beside the whole program."""
    text, stages = text_of(name)
    whole = read(text)
    given = random_values(whole)
    before = given["w.grad"]
    found, _ = run_stages(stages_of(text, stages), given)
    made = sum(of_stage["w_grad"] - before for of_stage in found if "w_grad" in of_stage)
    low = "a cast" in name
    torch.testing.assert_close(
        made, run_whole(whole, given)["w_grad"] - before, rtol=0.02 if low else 1e-4, atol=0.1 if low else 1e-3
    )


def test_a_gradient_of_a_thousand_additions() -> None:
    """No recursion."""
    lines = ["g0 : f32[4 4] = add.Tensor(gc, gb)"]
    lines += [f"g{k} : f32[4 4] = add.Tensor(g{k - 1}, h{k})" for k in range(1, 1500)]
    hs = [f"h{k} : f32[4 4] = mul.Tensor(ga, {float(k)})" for k in range(1, 1500)]
    body = "".join(f"  {line}\n" for line in (*hs, *lines))
    program = read(HEAD + body + LAST.format("g1499"))
    stages = {**STAGES, **{f"h{k}": 0 for k in range(1, 1500)}, **{f"g{k}": 0 for k in range(1500)}, "w_grad_sum": 0}
    stages["g0"] = 1
    found = gradient_parts(node_of(program, "g1499"), assigned(program, stages).stage, set())
    assert sorted(found) == [0, 1, 2] and found[2].node.name == "gc"
