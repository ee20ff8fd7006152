"""Ranks whose optimizers have different states are told before anything moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import loops
import pytest
import torch
from equality import relative
from processes import ranks
from step_states import adamw, batch, everything, made
from steps import Pair, Single, differences, run
from torch import distributed

import autopar
from autopar import Mesh


def test_what_ranks_compare() -> None:
    step = made()
    told = step.optimizer_state.describe
    options = "AdamW(lr=0.01, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, decoupled_weight_decay=True)"
    assert told() == options
    run(step, batch(0))
    assert told() == f"{options} with a state of 4 parameters after 1 steps"
    run(step, batch(1))
    assert told() == f"{options} with a state of 4 parameters after 2 steps"
    step.load_state_dict(everything(step))
    assert told() == f"{options} with a state of 4 parameters after 2 steps", (
        "what is the same is told alike, loaded or not"
    )
    weight, bias = step.parallel.up.weight, step.parallel.up.bias
    step.optimizer.state[weight]["step"], step.optimizer.state[bias]["step"] = torch.tensor(12345678.0), 3
    assert told() == f"{options} with a state of 4 parameters after 2 3 12345678 steps"
    step.optimizer.state.pop(weight)
    for one in step.optimizer.state.values():
        one["step"] = torch.zeros((), device="meta")  # where a count cannot be read at once
    assert told() == f"{options} with a state of 3 parameters"


def diverging(zero: int) -> None:
    """One rank alone changes its optimizer's state: all are told before anything moves, and may go on when it is as it
    was."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = Pair().double()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step, single = (
        parallel.train_step(adamw(parallel), zero=zero, ema=0.9, clip_norm=1.0),
        Single(alone, adamw(alone), 1.0),
    )
    run(step, batch(0)), single(**batch(0))
    older = copy.deepcopy(step.optimizer.state_dict())
    run(step, batch(1)), single(**batch(1))
    newer = copy.deepcopy(step.optimizer.state_dict())
    plain = {
        **older,
        "state": {k: {n: loops.whole(v).clone() for n, v in one.items()} for k, one in older["state"].items()},
    }
    changes: list[tuple[str, Callable[[], Any]]] = [
        (" with a state of 4 parameters after 1 steps", lambda: step.optimizer.load_state_dict(copy.deepcopy(older))),
        (" with a state of 4 parameters after 1 steps", lambda: step.optimizer.load_state_dict(copy.deepcopy(plain))),
        ("", lambda: step.optimizer.state.clear()),
        (" with a state of 3 parameters after 2 steps", lambda: step.optimizer.state.pop(parallel.up.weight)),
        (
            " with a state of 4 parameters after 2 500 steps",
            lambda: step.optimizer.state[parallel.up.weight]["step"].fill_(500),
        ),
    ]
    stage = ", zero=1" if zero else ", clip_norm"
    for k, (told, change) in enumerate(changes, 2):
        before = {name: loops.whole(p).clone() for name, p in parallel.named_parameters()}
        if rank == 0:
            change()
        with pytest.raises(RuntimeError, match="the ranks make different calls") as caught:
            run(step, batch(k))
        _, first, second, remedy = str(caught.value).split("\n")
        assert first.startswith("    rank 0: ") and f"weight_decay=True){told}{stage}" in first, first
        assert (
            second.startswith("    rank 1: ")
            and f"weight_decay=True) with a state of 4 parameters after 2 steps{stage}" in second
        ), second
        assert "with the same options, learning rates and optimizer states" in remedy
        assert all(torch.equal(loops.whole(p), before[name]) for name, p in parallel.named_parameters())
        step.optimizer.load_state_dict(copy.deepcopy(newer))
    assert relative(run(step, batch(9)), single(**batch(9))[0]) <= 1e-11
    assert max(differences(step, single).values()) <= 1e-9


@pytest.mark.processes
@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_that_differ(zero: int) -> None:
    ranks(2).run(diverging, zero)
