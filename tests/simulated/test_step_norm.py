"""The norm of a step's gradients: of all parameters or of the optimizer's, clipped or only measured, as on a single
device."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from norms import Head, clipped_alike, head_alone
from processes import ranks

import autopar
from autopar import Mesh

CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"zero": 1, "microbatches": 2}),
    ({"dp": 2, "tp": 2}, {"zero": 2, "microbatches": 3}),
    ({"dp": 3}, {"zero": 3, "microbatches": 2}),
]


KEPT = [*((*CASES[k], which) for k, which in
          [(0, None), (1, "all"), (1, "optimizer"), (2, None), (3, "all"), (3, "optimizer")])]  # fmt: skip
MORE = [(*CASES[k], which) for k, which in
        [(0, "all"), (0, "optimizer"), (1, None), (2, "all"), (2, "optimizer"), (3, None)]]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "options", "clip_parameters"),
    [
        *KEPT,
        *(pytest.param(*case, marks=pytest.mark.sweep("its mesh and what is clipped occur in KEPT")) for case in MORE),
    ],
    ids=str,
)
def test_an_optimizer_over_a_part_of_the_model(
    sizes: dict[str, int], options: dict[str, Any], clip_parameters: str | None
) -> None:
    clipped_alike(sizes, options, clip_parameters)


@pytest.mark.processes
@pytest.mark.parametrize(("sizes", "options"), [*CASES[1:2], ({"dp": 4}, {"zero": 3})], ids=str)
@pytest.mark.parametrize("clip_parameters", ["all", "optimizer"])
def test_on_processes(sizes: dict[str, int], options: dict[str, Any], clip_parameters: str) -> None:
    ranks(4).run(clipped_alike, sizes, options, clip_parameters)


@pytest.mark.parametrize(("clip_parameters", "wanted"), [("all", True), ("optimizer", False)])
def test_gradients_that_nobody_measures_are_not_computed(clip_parameters: str, wanted: bool) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    for options in ({"clip_norm": 1.0}, {"grad_norm": True}):
        parallel = autopar.parallelize(Head(), Mesh(dp=2), "ddp")
        step = parallel.train_step(head_alone(parallel), clip_parameters=clip_parameters, **options)
        assert ("'body.weight.grad'" in str(step.capture(x))) is wanted
    assert "body.weight.grad" not in str(
        parallel.train_step(head_alone(parallel)).capture(torch.randn(4, 6, dtype=torch.float64))
    )


@pytest.mark.parametrize(
    "options", [{}, {"amp": "fp16-O2", "loss_scale": 2.0**12}, {"microbatches": 2, "zero": 2}], ids=str
)
def test_a_norm_that_is_only_measured_changes_no_bit(options: dict[str, Any]) -> None:
    """Nor does it with fp16, where a gradient that only the norm reads overflows."""
    torch.manual_seed(0)
    model, x = Head(1e37 if "amp" in options else 1.0).float(), torch.randn(4, 6)
    pair = [autopar.parallelize(copy.deepcopy(model), Mesh(dp=2), "ddp") for _ in range(2)]
    plain, measured = (one.train_step(head_alone(one), grad_norm=k == 1, **options) for k, one in enumerate(pair))
    for _ in range(3):
        losses = [one.simulate(x) for one in (plain, measured)]
        assert torch.equal(*losses) and plain.grad_norm is None and measured.grad_norm is not None
        assert plain.skipped is None or not (plain.skipped or measured.skipped or measured.grad_norm.isfinite())
    assert all(torch.equal(a, b) for a, b in zip(*(one.parameters() for one in pair), strict=True))
    assert not torch.equal(pair[0].head.weight, model.head.weight)


def test_measured_and_clipped_norms_are_one() -> None:
    torch.manual_seed(0)
    model, x = Head(), torch.randn(4, 6, dtype=torch.float64)
    norms = []
    for options in (
        {"grad_norm": True},
        {"clip_norm": 0.1},
        {"clip_norm": math.inf},
        {"clip_norm": 0.1, "grad_norm": True},
    ):
        parallel = autopar.parallelize(copy.deepcopy(model), Mesh(dp=2), "ddp")
        step = parallel.train_step(head_alone(parallel), **options)
        step.simulate(x)
        norms.append(step.grad_norm)
    assert len({float(norm) for norm in norms}) == 1 and float(norms[0]) > 0.2


def test_an_overflow_in_what_is_clipped_skips_the_step() -> None:
    """A norm that is inf would make every gradient zero or NaN."""
    torch.manual_seed(0)
    parallel = autopar.parallelize(Head(1e37).float(), Mesh(dp=2), "ddp")
    before = parallel.head.weight.detach().clone()
    step = parallel.train_step(head_alone(parallel), amp="fp16-O2", loss_scale=2.0**12, clip_norm=1.0)
    step.simulate(torch.randn(4, 6))
    assert step.skipped and torch.equal(before, parallel.head.weight)
