"""Optimizers whose numbers a scheduler changes at every step, in whole steps and beside torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import loops
import steps
import torch
from equality import relative
from presets import preset_of
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

import autopar
from autopar import Mesh


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=1e-2, total_steps=12)


def cyclic(optimizer: Optimizer) -> LRScheduler:
    return CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=3)


# …, and what is cycled beside the learning rate
SCHEDULES: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Optimizer], LRScheduler], str]] = {
    "adamw one cycle": (lambda model: AdamW(loops.groups_of(model), lr=1e-2), one_cycle, "beta1"),
    "adam cyclic": (lambda model: Adam(loops.groups_of(model), lr=1e-2, amsgrad=True), cyclic, "beta1"),
    "sgd one cycle": (
        lambda model: SGD(loops.groups_of(model), lr=1e-2, momentum=0.9, nesterov=True),
        one_cycle,
        "momentum",
    ),
    "sgd cyclic": (lambda model: SGD(loops.groups_of(model), lr=1e-2, momentum=0.9), cyclic, "momentum"),
}


def scheduled_alike(name: str, sizes: dict[str, int], zero: int, called: bool = False) -> None:
    """Ten steps under a scheduler, with a weight decay that grows: losses and parameters are those of torch's loop at
    each of them, and one update has been made, whose operands the numbers are."""
    make, schedule, cycled = SCHEDULES[name]
    torch.manual_seed(0)
    of, batches, _ = steps.MODELS["mlp"]
    model = of()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), preset_of(sizes))
    step, single = parallel.train_step(make(parallel), zero=zero), steps.Single(alone, make(alone))
    schedules = [schedule(one.optimizer) for one in (step, single)]
    seen = set()
    for k in range(10):
        for one in (step, single):
            one.optimizer.param_groups[0]["weight_decay"] = 0.01 * k
        seen.add(float(step.optimizer_state.numbers(torch.device("cpu"))[f".{cycled}.0"]))
        ours, (loss, _) = steps.run(step, batches(k), called=called), single(**batches(k))
        for one in schedules:
            one.step()
        assert relative(ours, loss) <= 1e-12 * (k + 1), (k, ours, loss)
        for (place, a), (_, b) in zip(parallel.named_parameters(), alone.named_parameters(), strict=True):
            assert relative(loops.whole(a), b) <= 1e-12 * (k + 1), (k, place)
    assert max(steps.differences(step, single).values()) <= 1e-11
    assert len(seen) > 3, "the scheduler changes it"
    assert step.captures == len(step._captured.updates) == step._captured.made - 1 == 1
    text = str(step.program.update)
    assert f"{cycled}={cycled}_0, " in text and f"{cycled}={cycled}_1, " in text, "of each group its own"
