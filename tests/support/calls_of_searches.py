"""A training step whose plan is searched, on each of four processes."""

from __future__ import annotations

import copy
import math

import loops
import pytest
import steps
import torch
from equality import relative
from searched import FAST
from steps import Single, adamw, differences, run

import autopar
from autopar import Mesh
from autopar.errors import MemoryLimitError


def searched_step() -> None:
    """A plan that one rank has searched moves the parameters, which stay the same objects; their state is saved and
    loaded, and the model is called between steps."""
    torch.manual_seed(0)
    make, batches, _ = steps.MODELS["mlp"]
    model = make(1)
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), "search", machine=FAST)
    step = parallel.train_step(adamw(parallel), microbatches=2, zero=1, clip_norm=0.5)
    single = Single(alone, adamw(alone), 0.5)
    before = {name: (id(p), p.placements) for name, p in parallel.named_parameters()}
    for k in range(2):
        assert relative(run(step, batches(k)), single(**batches(k))[0]) <= 1e-12
    after = {name: (id(p), p.placements) for name, p in parallel.named_parameters()}
    assert all(before[name][0] == after[name][0] for name in before) and before != after
    assert any(not placement.is_replicate() for _, placements in after.values() for placement in placements)
    assert step.solution is not None and step.solution.machine == FAST
    assert relative(loops.whole(parallel(**batches(9))), single.model(**batches(9))) <= 1e-12
    saved = {name: loops.whole(value).clone() for name, value in parallel.state_dict().items()}
    assert all(relative(saved[name], value) <= 1e-9 for name, value in alone.state_dict().items())
    run(step, batches(2))
    assert any(relative(loops.whole(value), saved[name]) > 1e-6 for name, value in parallel.state_dict().items())
    parallel.load_state_dict(saved)
    assert all(torch.equal(loops.whole(value), saved[name]) for name, value in parallel.state_dict().items())
    assert {name: (id(p), p.placements) for name, p in parallel.named_parameters()} == after
    step.optimizer.load_state_dict(copy.deepcopy(single.optimizer.state_dict()))
    assert relative(run(step, batches(2)), single(**batches(2))[0]) <= 1e-11
    assert max(differences(step, single).values()) <= 1e-9
    assert step.captures == 1


class Summed(torch.nn.Module):
    """Returns the mean square of what a module returns, as a loss."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).square().mean()


def open_step() -> None:
    """All ranks choose the same micro-batches, recomputation and stages within the limit, and all raise one error."""
    torch.manual_seed(0)
    make, batches, _ = steps.MODELS["mlp"]
    model = make(1)
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), "search", machine=FAST)
    options = {"microbatches": "search", "recompute": "search", "zero": "search", "clip_norm": 0.5}
    step = parallel.train_step(adamw(parallel), memory=20e3, **options)
    single = Single(alone, adamw(alone), 0.5)
    for k in range(3):
        assert relative(run(step, batches(k)), single(**batches(k))[0]) <= 1e-11
    assert max(differences(step, single).values()) <= 1e-9
    assert step.memory().peak <= 20e3 == step.solution.memory and step.captures == 1
    assert {row.microbatches for row in step.choice.candidates} == {1, 2, 3, 4, 6}
    assert parallel.job is not None
    assert len(set(step._calls.agreement.ranks.gathered(str(step.choice)))) == 1
    with pytest.raises(MemoryLimitError, match=r"ways to run the step fits.*; the one that comes nearest:") as refused:
        parallel.train_step(adamw(parallel), memory=1e3, microbatches="search", time_limit=10.0)(batches(0))
    assert len(set(step._calls.agreement.ranks.gathered(str(refused.value)))) == 1
    assert relative(run(step, batches(4)), single(**batches(4))[0]) <= 1e-11


def step_within_memory() -> None:
    """All ranks take one plan within the limit, also where it is searched again, and all raise one error."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    x = torch.randn(16, 64)
    parallel = autopar.parallelize(Summed(model), Mesh(dp=2, tp=2), machine="NVIDIA H100 80GB HBM3")
    free = parallel.train_step(torch.optim.AdamW(parallel.parameters()), memory=math.inf)
    free.capture(x)
    limit = 0.7 * free.memory().peak
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), memory=limit)
    losses = [float(step(x)) for _ in range(2)]
    assert step.memory().peak <= limit == step.solution.memory
    assert losses[1] < losses[0]
    with pytest.raises(MemoryLimitError, match=r"no plan was found that fits into 10\.0 kB a rank"):
        parallel.train_step(torch.optim.AdamW(parallel.parameters()), memory=1e4).capture(x)
    assert float(step(x)) < losses[1]
