"""The whole configuration: fp16-O2, a loss scale, recomputed blocks, micro-batches, ZeRO 1, clipping, AdamW, a
schedule, on dp=2 tp=2."""

from __future__ import annotations

import copy
import re
from typing import Any

import loops
import pytest
import torch
from equality import relative
from processes import ranks
from steps import LowPrecision, distance, narrow, run
from threads import one_thread  # noqa: F401
from torch import nn
from transformers_models import llama

import autopar
from autopar import Mesh
from autopar.plan.loss_scaling import LossScaling

MICROBATCHES = 16
OPTIONS: dict[str, Any] = {
    "amp": "fp16-O2",
    "loss_scale": 1024,
    "recompute": "blocks",
    "microbatches": MICROBATCHES,
    "zero": 1,
    "clip_norm": 1.0,
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)


def several_steps(count: int, layers: int) -> None:
    """Beside two loops of a single device in plain torch, with 16 micro-batches: one with the same options, one in
    float32. Losses and norms are no further from float32 than the former's, or a rounding of fp16; parameters at most a
    fifth of what they moved."""
    torch.manual_seed(0)
    model = llama(kv=2, layers=layers).float()
    begin, scaling = copy.deepcopy(model), LossScaling(1024.0)
    low, exact = (
        LowPrecision(own := copy.deepcopy(model), adamw(own), amp, scaling, clip_norm=1.0, microbatches=MICROBATCHES)
        for amp in ("fp16-O2", None)
    )
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), "megatron")
    step = parallel.train_step(adamw(parallel), **OPTIONS)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one.optimizer, 10) for one in (step, low, exact)]
    rounding = torch.finfo(torch.float16).eps / 2
    for k in range(count):
        batch = loops.text(k, rows=2 * MICROBATCHES)
        ours = run(step, batch, promoted=False), step.grad_norm
        theirs, truth = low(**batch), exact(**batch)
        for schedule in schedules:
            schedule.step()
        for a, b, c, least in zip(ours, theirs, truth, (rounding, 8 * rounding), strict=True):
            assert relative(a, c) <= max(3 * relative(b, c), least), (k, a, b, c)
        assert not step.skipped
    assert step.captures == 1 and float(step.scaler[0]) == low.scales[-1] == 1024
    noise, found, moved = (
        distance(low.model, exact.model),
        distance(parallel, exact.model),
        distance(begin, exact.model),
    )
    assert found <= max(4 * noise, 0.05 * moved), (noise, found, moved)
    states = [loops.whole(value) for one in step.optimizer.state.values() for value in one.values()]
    assert {tensor.dtype for tensor in (*parallel.parameters(), *states)} == {torch.float32}


@pytest.mark.processes
def test_configuration_of_paddle_60022() -> None:
    several_steps(3, layers=2)
    ranks(4).run(several_steps, 2, 1)


@pytest.mark.long
def test_the_program_of_that_configuration() -> None:
    """All of it is in the text: low-precision parameters, a scaled backward, recomputed blocks, gradients that wait
    over dp, and one update that reduces them once, unscales, clips and skips what overflowed; and before all that the
    split float32 parameters are cast, and gathered."""
    parallel = autopar.parallelize(llama(kv=2, layers=2).float(), Mesh(dp=2, tp=2), "megatron")
    step = parallel.train_step(adamw(parallel), **OPTIONS).capture(narrow(loops.text(0, rows=2 * MICROBATCHES)))
    made, micro, update = str(step.programs["copy"]), str(step.micro), str(step.update)
    down = "model_layers_0_mlp_down_proj_weight"
    assert step.microbatches == MICROBATCHES and "count" in step.programs
    assert f"  {down} : f16[16 24/tp] = param(" in micro and f"  {down}_grad : f32[16 24/tp] +dp = state(" in micro
    assert not re.search(r"(all_reduce|reduce_scatter|all_gather|all_to_all)\(.*dp\)", micro), "nothing moves over dp"
    assert (
        f"  {down} : f32[16/dp 24/tp] = state({down}_next, " in update
        and f"  {down}_exp_avg : f32[16/dp 24/tp] = state(" in update
    )
    assert f"  {down}_grad_dp : f32[16/dp 24/tp] = reduce_scatter({down}_grad, 0, dp)" in update
    assert f"  {down}_copy_next : f16[16/dp 24/tp] = _to_copy({down}, dtype=f16)" in made
    assert f"  {down}_copy_next_dp : f16[16 24/tp] = all_gather({down}_copy_next, 0, dp)" in made
    for part in (
        "found_inf : f32[] = ",
        "norm : f32[] = ",
        "autopar::updated_scale(scale, growth, found_inf, ",
        "autopar::counted(step_0, found_inf)",
    ):
        assert part in update, part
    forward, _, backward = micro.partition("backward:")
    assert "silu(" in forward and "silu(" in backward.replace("silu_backward(", ""), "blocks are computed again"
