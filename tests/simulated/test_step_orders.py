"""The order of a step: kept by digest, within the memory of ``today``, and refused where it is said wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import steps
import torch
from overlapped_steps import made
from transformers_models import llama

import autopar
from autopar import Mesh
from autopar.costs.machine import machine_from
from autopar.errors import ProfileError, ScheduleError
from autopar.scheduling import ByteScheduler
from autopar.scheduling.programs.functions import functions_of, program_ops
from autopar.scheduling.programs.order import ORDERS, just_in_time

X, Y = torch.randn(12, 8), torch.randn(12, 8)


def pair(overlap: Any, **options: Any) -> Any:
    step = made(steps.Pair(), Mesh(dp=2), "ddp", overlap=overlap, **options)
    step.capture(X, Y)
    return step


# -- kept by digest ----------------------------------------------------------------------------------------------------


def decided(overlap: Any, **options: Any) -> int:
    """How many orders are decided for a step of a model that is made anew."""
    before = ORDERS.decided
    pair(overlap, **options)
    return ORDERS.decided - before


def test_a_second_capture_plans_nothing() -> None:
    ORDERS._kept.clear()
    first = decided("longest-tail", zero=1)
    assert first > 0 and decided("longest-tail", zero=1) == 0
    for other in ("today", ByteScheduler(64, 256), ByteScheduler(64, 512), {"*_grad_dp": 1}, {"*_grad_dp": 2}):
        assert decided(other, zero=1) == first, other
        assert decided(other, zero=1) == 0, other


def test_another_program_or_machine_is_planned_anew() -> None:
    ORDERS._kept.clear()
    first = decided("longest-tail")
    assert decided("longest-tail", zero=1) > 0
    parallel = autopar.parallelize(steps.Pair(), Mesh(dp=2), "ddp", machine="NVIDIA H100 80GB HBM3")
    before = ORDERS.decided
    parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-2)).capture(X, Y)
    assert ORDERS.decided - before == first


def test_few_orders_are_kept() -> None:
    ORDERS._kept.clear()
    for size in range(1, 6):
        pair(ByteScheduler(size, 64))
    assert 0 < len(ORDERS._kept) <= ORDERS.MOST


# -- memory ------------------------------------------------------------------------------------------------------------

BATCH = {"input_ids": torch.randint(22, (8, 64)), "labels": torch.randint(22, (8, 64))}
MEMORY = [
    ({"dp": 2, "tp": 2}, "megatron", {}),
    ({"dp": 2}, "ddp", {"zero": 0}),
    *(
        pytest.param(
            *case, marks=pytest.mark.sweep("the meshes and stages of ZeRO differ, and what is tested does not")
        )
        for case in [
            ({"tp": 2}, "megatron", {}),
            ({"dp": 2}, "ddp", {"zero": 3}),
            ({"dp": 2}, "ddp", {"zero": 1, "recompute": "blocks"}),
        ]
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "plan", "options"), MEMORY, ids=str)
def test_the_default_order_needs_little_more_memory(sizes: dict[str, int], plan: str, options: dict[str, Any]) -> None:
    """At most 1.05 of that of ``today``, counted on what is lowered; a schedule says what its step needs."""
    parallel = autopar.parallelize(llama(kv=2, layers=1).float(), Mesh(sizes), plan)
    needs = {}
    for overlap in ("today", "longest-tail"):
        step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-3), overlap=overlap, **options)
        step.capture(BATCH)
        needs[overlap] = step.memory(0).made
        said = max(part.schedule.memory for part in step.communication.parts)
        assert abs(said - needs[overlap]) <= 0.02 * needs[overlap], overlap
    assert needs["longest-tail"] <= 1.05 * needs["today"]


@pytest.mark.long
def test_the_default_order_gathers_parameters_together() -> None:
    """Those of the backward too, though each is read behind another gradient: start-up costs are most of a step."""
    parallel = autopar.parallelize(llama(kv=2, layers=2).float(), Mesh(dp=4), "ddp")
    found = {}
    for overlap in ("today", "longest-tail"):
        step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-3), overlap=overlap, zero=3)
        step.capture(BATCH)
        found[overlap] = step.communication
    assert found["longest-tail"].parts[0].schedule.policy == "longest-tail"
    assert found["longest-tail"].makespan < 0.95 * found["today"].makespan


@pytest.mark.long
def test_the_default_order_hides_more_of_tensor_parallelism() -> None:
    """Weight gradients stand behind the start of the reduction of the input's gradient."""
    free = replace(machine_from("cpu"), start=0.0)  # else fewer messages count for more than hidden ones
    parallel = autopar.parallelize(llama(kv=2, layers=2).float(), Mesh(tp=2), "megatron", machine=free)
    found = {}
    for overlap in ("today", "longest-tail"):
        step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-3), overlap=overlap)
        step.capture(BATCH)
        found[overlap] = step.communication
    assert found["longest-tail"].makespan < 0.95 * found["today"].makespan
    assert found["longest-tail"].exposed < 0.8 * found["today"].exposed
    assert found["longest-tail"].bound == found["today"].bound, "it is a bound of every order"


def test_what_needs_no_gradient_runs_just_in_time() -> None:
    """Behind the gradient that its reader also reads; behind what is sent, if that is being reduced."""
    program = autopar.Program.parse("""\
program explicit on tp=2
  x : f32[8 8] = input
  up : f32[8 8/tp] = param
  d : f32[8 8/tp] = tangent(0)
forward:
  pow_1 : f32[8 8] = pow.Tensor_Scalar(x, 3)
  mm : f32[8 8/tp] = mm(pow_1, up)
backward:
  t : f32[8/tp 8] = t(up)
  mm_1 : f32[8 8] +tp = mm(d, t)
  mm_1_tp : f32[8 8] = all_reduce(mm_1, tp)
  pow_2 : f32[8 8] = pow.Tensor_Scalar(x, 2)
  mul : f32[8 8] = mul.Scalar(pow_2, 3)
  mul_1 : f32[8 8] = mul.Tensor(mm_1_tp, mul)
  return mm
  grad x = mul_1
""")
    (function,) = functions_of(program, whole=True)
    ops = program_ops(program, function, {})
    assert not any(op.behind for op in ops)
    behind = {op.name: op.behind for op in just_in_time(program, ops) if op.behind}
    assert behind == {"pow_2": ("mm_1",), "mul": ("mm_1",)}


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlap", "kind", "text"),
    [
        ("longest-tale", ScheduleError, "there is no policy 'longest-tale'; did you mean 'longest-tail'; there are "),
        ("priorities", ScheduleError, r"give a dict, as in overlap=\{'\*_grad_dp': 1\}"),
        (3, TypeError, r"a policy is a name, such as 'longest-tail', or ByteScheduler\(…\), not 3"),
        ({}, TypeError, "priorities are globs over names of values, and integers"),
        ({"*": 1.5}, TypeError, "priorities are globs over names of values, and integers"),
    ],
)
def test_wrong_values(overlap: Any, kind: type[Exception], text: str) -> None:
    """Before anything is captured, for calls and for steps."""
    with pytest.raises(kind, match=text):
        autopar.parallelize(steps.Pair(), Mesh(dp=2), "ddp", overlap=overlap)
    parallel = autopar.parallelize(steps.Pair(), Mesh(dp=2), "ddp")
    with pytest.raises(kind, match=text):
        parallel.train_step(torch.optim.AdamW(parallel.parameters()), overlap=overlap)


@pytest.mark.parametrize("options", [{}, {"zero": 3, "microbatches": 3}], ids=str)
def test_a_glob_that_matches_nothing(options: dict[str, Any]) -> None:
    """In none of the programs of a step; the nearest names are told."""
    with pytest.raises(ScheduleError, match=r"the priority '\*_gard_dp' matches no op; near it: \w+"):
        pair({"*_gard_dp": 1}, **options)
    with pytest.raises(ScheduleError, match=r"the priority 'rleu' matches no op; near it: .*relu"):
        autopar.parallelize(steps.Pair(), Mesh(dp=2), "ddp", overlap={"rleu": 1}, example=(X, Y))


def test_a_glob_that_matches_in_one_program_of_a_step() -> None:
    """The inner micro-batches have no reduction of gradients; the last one has."""
    step = pair({"*_grad_dp": 1}, zero=0, microbatches=3)
    assert set(step.local(0).programs) == {"inner", "last"}
    assert "_grad_dp_start" in str(step.local(0)["last"]) and "_grad_dp_start" not in str(step.local(0)["inner"])


def test_priorities_that_contradict_what_values_depend_on() -> None:
    text = "'relu' has -1 and goes before 'addmm' with 2, which it depends on; give 'addmm' at most -1"
    with pytest.raises(ScheduleError, match=f"the priorities contradict the order: {text}"):
        pair({"relu": -1, "addmm": 2})


def test_a_profile_of_another_program() -> None:
    one = pair("today")
    profile = one.measure()
    with pytest.raises(ProfileError, match="profile"):
        made(steps.Squared(torch.nn.Linear(8, 4)), Mesh(dp=2), "ddp", profile=profile).capture(X)
