"""Golden files of whole steps: the text of a column-row pair with a loss, on each stage of ZeRO and in mixed precision.

``pytest --update-goldens`` rewrites them. What a stage of ZeRO means is said below by counting its transfers.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import Pair

import autopar
from autopar import Mesh
from autopar.step.program import Step

GOLDEN = Path(__file__).parent / "step"
PLAN = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}
CASES: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"zero": stage} for stage in range(4)},
    "bf16-O2_zero1": {"zero": 1, "amp": "bf16-O2"},
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, update_goldens: bool) -> None:
    path = GOLDEN / f"{name}.txt"
    parallel = autopar.parallelize(Pair(), Mesh(dp=2, tp=2), PLAN)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    step = parallel.train_step(optimizer, microbatches=2, clip_norm=1.0, **CASES[name])
    text = str(step.capture(torch.randn(8, 8), torch.randn(8, 8)))
    if update_goldens:
        path.write_text(text)
    assert text == path.read_text()
    again = Step.parse(text)
    again.verify()
    assert str(again) == text


def test_every_golden_has_a_case() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(CASES)


def transfers(name: str) -> Counter[tuple[str, str, str, str]]:
    """How many there are of each (program, phase, kind, axis) of tensors with dims."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    program = phase = ""
    for line in (GOLDEN / f"{name}.txt").read_text().splitlines():
        if head := re.match(r"(\w+) program ", line):
            program = head[1]
        elif line.endswith(":"):
            phase = line[:-1]
        elif (
            call := re.search(r" = (all_reduce|reduce_scatter|all_gather|slice)\(\w+, (?:\d+, )?(\w+)\)", line)
        ) and "[]" not in line:
            found[program, phase, call[1], call[2]] += 1
    return found


# up.bias has no dim that tp leaves free: it stays as it is, and is reduced
WHOLE = ("up.weight", "down.weight", "down.bias")
MEGATRON = {("micro", "forward", "all_reduce", "tp"): 1}  # behind the row-split product
STAGES: dict[str, dict[tuple[str, str, str, str], int]] = {
    "zero0": {("update", "update", "all_reduce", "dp"): 4},
    "zero1": {
        ("update", "update", "reduce_scatter", "dp"): 3, ("update", "update", "all_reduce", "dp"): 1,
        ("update", "update", "slice", "dp"): 3, ("update", "update", "all_gather", "dp"): 3,
    },
    "zero2": {
        ("micro", "backward", "reduce_scatter", "dp"): 3, ("micro", "backward", "all_reduce", "dp"): 1,
        ("update", "update", "slice", "dp"): 3, ("update", "update", "all_gather", "dp"): 3,
    },
    "zero3": {
        ("micro", "backward", "reduce_scatter", "dp"): 3, ("micro", "backward", "all_reduce", "dp"): 1,
        ("micro", "forward", "all_gather", "dp"): 3,
    },
    "bf16-O2_zero1": {  # parameters in float32 are split too: what is gathered are their copies
        ("copy", "update", "all_gather", "dp"): 3, ("update", "update", "reduce_scatter", "dp"): 3,
        ("update", "update", "all_reduce", "dp"): 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_stage_means(name: str) -> None:
    """1: gradients wait over dp through all micro-batches, and are then reduce-scattered once, each, before the update,
    and parameters gathered behind it. 2: each micro-batch reduce-scatters. 3: each gathers, and the update moves
    nothing but numbers. The one weight that the backward needs is that of the last layer, which it still has from the
    forward."""
    assert transfers(name) == STAGES[name] | MEGATRON


@pytest.mark.parametrize(("name", "state", "gradient", "parameter"), [
    ("zero0", "f32[16/tp 8]", "f32[16/tp 8] +dp", "f32[16/tp 8]"),
    ("zero1", "f32[16/tp 8/dp]", "f32[16/tp 8] +dp", "f32[16/tp 8]"),
    ("zero2", "f32[16/tp 8/dp]", "f32[16/tp 8/dp]", "f32[16/tp 8]"),
    ("zero3", "f32[16/tp 8/dp]", "f32[16/tp 8/dp]", "f32[16/tp 8/dp]"),
    ("bf16-O2_zero1", "f32[16/tp 8/dp]", "f32[16/tp 8] +dp", "bf16[16/tp 8]"),
])  # fmt: skip
def test_what_is_split(name: str, state: str, gradient: str, parameter: str) -> None:
    micro, _, update = (GOLDEN / f"{name}.txt").read_text().partition("update program")
    assert f"  up_weight_momentum_buffer : {state} = state(" in update
    assert f"  up_weight_grad : {gradient} = state(" in micro and f"  up_weight_grad : {gradient} = buffer(" in update
    assert f"  up_weight : {parameter} = param(" in micro


def test_copies_are_cast_before_they_are_gathered() -> None:
    """Half the bytes; and the float32 parameter is never whole over dp."""
    copy, _, rest = (GOLDEN / "bf16-O2_zero1.txt").read_text().partition("micro program")
    for name in ("up_weight", "down_weight", "down_bias"):
        assert re.search(rf"  {name} : f32\[.*/dp.*\] = param\(", copy)
        assert re.search(rf"  {name}_copy_next : bf16\[.*/dp.*\] = _to_copy\({name}, dtype=bf16\)\n", copy)
        assert re.search(rf"  {name}_copy_next_dp : bf16\[.*\] = all_gather\({name}_copy_next, \d, dp\)\n", copy)
        assert re.search(rf"  {name} : f32\[.*/dp.*\] = state\({name}_next, ", rest.partition("update program")[2])
