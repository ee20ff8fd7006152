"""What schedulers change at every step is an operand of the update: one program, and torch's numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import schedules
import steps
import torch
from equality import relative
from lion import Lion, lion
from presets import preset_of
from processes import ranks
from torch.optim.lr_scheduler import OneCycleLR

import autopar
from autopar import Mesh
from autopar.optimizers import register_optimizer
from autopar.optimizers.definition import DEFINITIONS
from autopar.optimizers.in_place import IN_PLACE
from autopar.step.captures import UPDATES_KEPT


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_ten_steps(name: str, zero: int) -> None:
    schedules.scheduled_alike(name, {"dp": 2}, zero)


@pytest.mark.processes
@pytest.mark.parametrize(("name", "zero"), [("adamw one cycle", 1), ("sgd cyclic", 0)])
def test_on_processes(name: str, zero: int) -> None:
    ranks(2).run(schedules.scheduled_alike, name, {"dp": 2}, zero)


def test_kernels_stay_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each parameter group, in place."""
    counts: list[int] = []
    for op, update in IN_PLACE.items():
        monkeypatch.setitem(
            IN_PLACE,
            op,
            lambda params, *args, _update=update, **numbers: (
                counts.append(len(params)),
                _update(params, *args, **numbers),
            ),
        )
    schedules.scheduled_alike("adamw one cycle", {"dp": 1}, 0, called=True)
    groups = [len(group["params"]) for group in schedules.loops.groups_of(steps.MODELS["mlp"][0]())]
    assert [sorted(counts[k : k + len(groups)]) for k in range(0, len(counts), len(groups))] == [sorted(groups)] * 10


def test_where_numbers_are() -> None:
    """Kernels read them as numbers, so they are on the host, whatever the device; the learning rate they read where it
    is."""
    make, _, _ = schedules.SCHEDULES["adamw one cycle"]
    parallel = autopar.parallelize(steps.MODELS["mlp"][0](), Mesh(dp=2), "ddp")
    found = parallel.train_step(make(parallel)).optimizer_state.numbers(torch.device("meta"))
    assert {name: (tensor.device.type, tensor.dtype) for name, tensor in found.items()} == {
        f".{name}.{group}": ("meta" if name == "lr" else "cpu", torch.float64)
        for group in (0, 1)
        for name in ("lr", "beta1", "beta2", "weight_decay")
    }


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(DEFINITIONS)
    register_optimizer(Lion, update=lion, state="exp_avg", options="betas weight_decay", scheduled="betas weight_decay")
    yield
    DEFINITIONS.clear()
    DEFINITIONS.update(before)


def beside(mesh: Mesh) -> Any:
    """A model on a mesh, the same alone, and its batches."""
    torch.manual_seed(0)
    make, batches, _ = steps.MODELS["mlp"]
    model = make()
    alone = copy.deepcopy(model)
    return autopar.parallelize(model, mesh, preset_of(mesh.names)), alone, batches


@pytest.mark.usefixtures("registered")
def test_a_registered_optimizer() -> None:
    """What it names is an input of plain ops; a tuple is one for each of its numbers."""
    parallel, alone, batches = beside(Mesh(dp=2))
    step, single = (kind(one, Lion(one.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)) for kind, one in (
        (lambda parallel, optimizer: parallel.train_step(optimizer, zero=1), parallel),
        (steps.Single, alone)))  # fmt: skip
    rates = [OneCycleLR(one.optimizer, max_lr=1e-2, total_steps=12) for one in (step, single)]
    for k in range(10):
        assert relative(step.simulate(batches(k)), single(**batches(k))[0]) <= 1e-12 * (k + 1)
        for rate in rates:
            rate.step()
    assert max(steps.differences(step, single).values()) <= 1e-11
    assert len({tuple(one.optimizer.param_groups[0]["betas"]) for one in (step, single)}) == 1
    assert step._captured.made == 2
    inputs = [line.split()[0] for line in str(step.program.update).splitlines() if " = input('" in line]
    assert inputs == ["lr_0", "betas_0_0", "betas_1_0", "weight_decay_0"]
    on_meta = step.optimizer_state.numbers(torch.device("meta"))
    assert all(tensor.is_meta for tensor in on_meta.values()), "plain ops compute with them where parameters are"


@pytest.mark.long
def test_updates_that_constants_make_are_not_kept_for_ever() -> None:
    """An option that is no operand, changed at every step: each is another update, and so many are kept, with what was
    made of them."""
    parallel, alone, batches = beside(Mesh(dp=1))
    step, single = parallel.train_step(steps.adamw(parallel)), steps.Single(alone, steps.adamw(alone))
    for k in range(12):
        for one in (step, single):
            # the last was used seven steps before
            one.optimizer.param_groups[0]["eps"] = 1e-8 * (k + 1 if k < 11 else 5)
        assert relative(steps.run(step, batches(k), called=True), single(**batches(k))[0]) <= 1e-11
    assert max(steps.differences(step, single).values()) <= 1e-9
    assert (step.captures, step._captured.made, len(step._captured.updates)) == (1, 12, UPDATES_KEPT)
    assert len(step._here._programs) == 1 + UPDATES_KEPT
