"""Optimizers that nobody told autopar of: their own step is run on pieces of parameters, and has the numbers of a
single device."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from typing import Any

import pytest
import steps
import torch
from equality import relative
from own_optimizers import LOOP, MADE, REASONS, Lion
from steps import Single
from torch import nn

import autopar
from autopar import Mesh
from autopar.optimizers import definition_of


def trained(
    name: str, sizes: dict[str, int], called: bool = False, count: int = 4, **options: Any
) -> tuple[Any, Single, Any]:
    """A step and the loop of a single device, after some steps with a schedule."""
    make, batches, plan = steps.MODELS["mlp"]
    torch.manual_seed(0)
    model, (optimizer, _) = make(), MADE[name]
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), plan if "tp" in sizes else "ddp")
    step, single = parallel.train_step(optimizer(parallel), **options), Single(alone, optimizer(alone))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one.optimizer, 0.8) for one in (step, single)]
    for k in range(count):
        assert relative(steps.run(step, batches(k), called=called), single(**batches(k))[0]) <= 1e-11, k
        alone.zero_grad()
        for schedule in schedules:
            schedule.step()
    return step, single, batches


def assert_alike(step: Any, single: Single) -> None:
    assert all(
        relative(a, b) <= 1e-9 for a, b in zip(step.parallel.parameters(), single.model.parameters(), strict=True)
    )
    ours, theirs = step.optimizer.state_dict()["state"], single.optimizer.state_dict()["state"]
    for k, state in theirs.items():
        assert state.keys() == ours[k].keys()
        assert all(
            relative(torch.as_tensor(ours[k][n]).double(), torch.as_tensor(value).double()) <= 1e-9
            for n, value in state.items()
        )


STEPS = {"radam": 6}  # whose sixth is the first that it rectifies


@pytest.mark.parametrize(("name", "zero"), [(name, k % 4) for k, name in enumerate(MADE)], ids=str)
def test_they_have_the_numbers_of_a_single_device(name: str, zero: int) -> None:
    step, single, _ = trained(name, {"dp": 2, "tp": 2}, count=STEPS.get(name, 4), microbatches=2, zero=zero)
    assert_alike(step, single)
    assert len(step._captured.updates) == 1, "another learning rate is no other program"
    assert step._captured.trained[0].update.elementwise is MADE[name][1]
    text = str(step.program)
    assert autopar.step.program.Step.parse(text) == step.program


LOOPS = ("rmsprop", "radam", "asgd", "muon", "lion", "replacing")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in LOOPS else pytest.mark.sweep("the same update runs on simulated ranks"))
        for name in MADE
    ],
)
def test_in_place(name: str) -> None:
    """As processes run it: many parameters in one call of the class's step."""
    step, single, _ = trained(name, {"dp": 1}, count=STEPS.get(name, 4), called=True)
    assert_alike(step, single)
    last = step._captured.latest.update.last[0]
    (run,) = (one for program, one in step._here._programs.values() if program is last)
    lowered = next(iter(run.functions._made.values())).lowered
    assert sum("in_place" in node.name for node in lowered.graph.nodes) == 1


@pytest.mark.parametrize("name", ["rmsprop", "nadam", "lion"])
def test_state_dicts_both_ways(name: str) -> None:
    step, single, batches = trained(name, {"dp": 2}, zero=1, count=2)
    saved = copy.deepcopy(step.optimizer.state_dict())
    step.optimizer.load_state_dict(copy.deepcopy(single.optimizer.state_dict()))
    single.optimizer.load_state_dict(saved)
    for k in range(2, 4):
        assert relative(steps.run(step, batches(k)), single(**batches(k))[0]) <= 1e-11
    assert_alike(step, single)


def test_schedulers_of_other_numbers() -> None:
    """``OneCycleLR`` moves momentum and betas; the program stays."""
    make, batches, _ = steps.MODELS["mlp"]
    for optimizer in (
        lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, momentum=0.9),
        lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    ):
        model = make()
        alone = copy.deepcopy(model)
        parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
        step, single = parallel.train_step(optimizer(parallel)), Single(alone, optimizer(alone))
        schedules = [torch.optim.lr_scheduler.OneCycleLR(one.optimizer, 1e-2, total_steps=8) for one in (step, single)]
        for k in range(5):
            assert relative(steps.run(step, batches(k)), single(**batches(k))[0]) <= 1e-11
            for schedule in schedules:
                schedule.step()
        assert_alike(step, single)
        assert len(step._captured.updates) == 1


def test_a_step_that_overflows_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    parallel = autopar.parallelize(steps.Squared(model), Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.NAdam(parallel.parameters()), amp="fp16-O2", loss_scale=2.0**40)
    before = copy.deepcopy(parallel.state_dict())
    step.simulate(torch.randn(4, 4))
    assert step.skipped and all(torch.equal(value, before[name]) for name, value in parallel.state_dict().items())
    state = step.optimizer.state[next(iter(parallel.parameters()))]
    assert state["step"] == 0 and state["mu_product"] == 1 and not state["exp_avg"].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).to(dtype))
    optimizer = torch.optim.RMSprop([param], lr=1e-2)
    (group,) = optimizer.param_groups
    definition = definition_of(optimizer)
    new, state = definition.update(group)(
        param.detach(), torch.ones(6, 3, dtype=dtype), definition.initial(param, group), torch.tensor(1e-2)
    )
    wide = nn.Parameter(param.detach().float())
    wide.grad = torch.ones(6, 3)
    torch.optim.RMSprop([wide], lr=1e-2).step()
    assert torch.equal(new, wide.detach().to(dtype)) and new.dtype == state["square_avg"].dtype == dtype


@pytest.mark.parametrize(("kind", "options", "why"), REASONS, ids=[kind.__name__ for kind, _, _ in REASONS])
def test_what_is_refused(kind: Any, options: dict[str, Any], why: str) -> None:
    optimizer = kind([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))], **options)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(TypeError) as caught:
        definition_of(optimizer)
    name = kind.__name__
    assert (
        str(caught.value)
        == f"{name} cannot be part of a step's graph: {why}{LOOP}autopar.optimizers.register_optimizer({name}, "
        f"state=…, update=…)"
    )
    assert optimizer.state_dict() == before and torch.equal(optimizer.param_groups[0]["params"][0], torch.ones(4)), (
        "trials touch nothing"
    )


def test_states_by_dims_are_refused() -> None:
    class Split(Lion):
        def step_of(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            state.setdefault("matrix" if p.dim() > 1 else "vector", torch.zeros_like(p)).add_(grad)
            p.sub_(group["lr"] * grad)

    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))]
    with pytest.raises(
        TypeError,
        match=re.escape(
            "it keeps different states for parameters with different numbers of dims: give each kind a parameter "
            "group of its own"
        ),
    ):
        definition_of(Split(parameters))
    definition_of(Split([{"params": [one]} for one in parameters]))


@pytest.mark.long
def test_no_optimizer_is_kept() -> None:
    step, _, _ = trained("rmsprop", {"dp": 2}, count=1)
    kept = weakref.ref(step.optimizer)
    del step
    gc.collect()
    assert kept() is None
