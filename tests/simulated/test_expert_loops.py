"""Experts in loops over the tokens that choose them: one capture equals eager, whatever the tokens choose."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from expert_loops import CHOICES, EXPERTS, LOOPS, Mixture, OverExperts, Stacked, Together, batch, compare

import autopar
from autopar import Mesh, Program
from autopar.ir.nodes import node_at, record_of

SQUARE = Mesh(dp=2, ep=2)


@pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "mesh", [SQUARE, pytest.param(Mesh(dp=2), marks=pytest.mark.sweep("the square has dp too"))], ids=str
)
def test_a_loop_is_captured_once_for_all_choices(kind: type[Mixture], mesh: Mesh) -> None:
    """The captured call leaves no expert without tokens; in others some have none, and one has all."""
    torch.manual_seed(0)
    model = kind().double()
    parallel = autopar.parallelize(model, mesh, "ddp", example=(batch("any").requires_grad_(),))
    for which in ("any", "alike", "others"):
        compare(model, parallel.simulate, batch(which))
    assert parallel.captures == 1


def test_the_batches_choose_differently() -> None:
    torch.manual_seed(0)
    model = OverExperts().double()
    chosen = {}
    for which in ("any", "alike"):
        choices = model.router(batch(which)).flatten(0, -2).topk(CHOICES).indices
        chosen[which] = torch.bincount(choices.flatten(), minlength=EXPERTS).tolist()
    assert min(chosen["any"]) > 0 and sorted(chosen["alike"]) == [0, 0, 12, 12]


def work(program: Program) -> int:
    """Multiplications of all batched matrix products."""
    total = 0
    for node in program.nodes:
        if node.target is torch.ops.aten.bmm.default:
            (batches, rows, inner), columns = record_of(node_at(node)).type.shape, record_of(node).type.shape[-1]
            total += batches * rows * inner * columns
    return total


@pytest.mark.parametrize("kind", [OverExperts, Stacked, Together], ids=lambda kind: kind.__name__)
def test_each_rank_computes_its_own_experts(kind: type[Mixture]) -> None:
    model, x = kind().double(), batch("any")
    parallel = autopar.parallelize(model, SQUARE, "ddp", example=(x,))
    products = [
        record_of(node).type.shape[0] for node in parallel.local(3).nodes if node.target is torch.ops.aten.bmm.default
    ]
    assert products and set(products) == {EXPERTS // 2}
    alone = autopar.parallelize(model, Mesh(dp=1), "ddp", example=(x,))
    assert work(parallel.local(0)) * 4 == work(alone.local(0))
    assert math.prod(SQUARE.sizes.values()) == 4


def test_the_work_is_said_beside_eagers() -> None:
    parallel = autopar.parallelize(OverExperts().double(), SQUARE, "ddp", example=(batch("any"),))
    notes = "\n".join(parallel.reports["capture"].notes)
    assert re.search(
        r"4 experts are computed for all tokens: 48 rows, which is 2\.0× the FLOPs of eager's, where each of the 24 "
        r"choices computes one row\n    expert_loops\.py:\d+  out\.index_add_\(0, token, ",
        notes,
    )


def test_a_loop_is_one_batched_computation() -> None:
    """The program does not grow with the number of experts."""
    program = autopar.parallelize(OverExperts().double(), Mesh(dp=2), "ddp", example=(batch("any"),)).program
    assert (
        sum(node.target is torch.ops.aten.bmm.default for node in program.nodes) == 5
    )  # two products, and three of their backward


def test_experts_drop_out() -> None:
    """With other numbers on other ranks; all gradients are finite, and different draws differ."""
    model = OverExperts().double()
    for expert in model.experts:
        expert.dropped = 0.5
    parallel = autopar.parallelize(model, SQUARE, "ddp", example=(batch("any"),))
    torch.manual_seed(0)
    first, second = parallel.simulate(batch("any")), parallel.simulate(batch("any"))
    assert not torch.equal(first, second)
    first.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    single = copy.deepcopy(model)
    with pytest.raises(autopar.CaptureError, match="draws random numbers for rows whose number is a value"):
        autopar.parallelize(single, SQUARE, "ddp", example=(batch("any"),), random="single")
