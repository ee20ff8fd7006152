"""Train on the stages of a pipeline, and go on elsewhere: other stages, other meshes, the plain model."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from calls_of_stages import values_here
from checkpoints import same
from models import COLUMN_ROW, Residual
from stage_checkpoints import everything, in_order
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar import Mesh, checkpoint

DECAY = 0.9
TRAININGS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pp4": ({"pp": 4}, {"schedule": "1f1b", "microbatches": 4}),
    "pp2 tp2": ({"pp": 2, "tp": 2}, {"schedule": "gpipe", "microbatches": 2}),
    "dp2 pp2": ({"dp": 2, "pp": 2}, {"schedule": "1f1b", "microbatches": 2, "zero": 1}),
    "dp2 tp2": ({"dp": 2, "tp": 2}, {}),
    "dp4": ({"dp": 4}, {"zero": 3}),
}


CUT = [  # four stages, uneven
    ["body.norms.0"],
    ["body.blocks.0"],
    ["body.norms.1", "body.blocks.1"],
    ["body.norms.2", "body.blocks.2", "body.norms.3", "body.blocks.3"],
]


class Squared(nn.Module):
    """Layers, of which those of one stage may be frozen."""

    def __init__(self, frozen: int | None = None) -> None:
        super().__init__()
        self.body = Residual(8, 12, 4)
        for name in [] if frozen is None else CUT[frozen]:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.body(x) - y).square().mean()


def batch(step: int, rows: int = 8) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {"x": torch.randn(rows, 8, dtype=torch.float64), "y": torch.randn(rows, 8, dtype=torch.float64)}


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def made(name: str, seed: int = 0, frozen: int | None = None, **options: Any) -> Any:
    sizes, more = TRAININGS[name]
    torch.manual_seed(seed)
    plan = COLUMN_ROW if "tp" in sizes else None
    parallel = autopar.parallelize(Squared(frozen).double(), Mesh(sizes), plan)
    return parallel.train_step(optimizer_of(parallel), ema=DECAY, **more, **options)


def alone(steps: int, frozen: int | None = None) -> dict[str, Any]:
    """Losses, weights and averages on one device."""
    torch.manual_seed(0)
    model = Squared(frozen).double()
    optimizer = optimizer_of(model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(step))
        loss.backward()
        optimizer.step()
        averaged.update_parameters(model)
        losses.append(float(loss.detach()))
    named = dict(model.named_parameters())
    states = {name: optimizer.state[p] for name, p in named.items() if p.requires_grad}
    return {"losses": losses, "model": named, "states": states, "ema": dict(averaged.module.named_parameters())}


def check(step: Any, wanted: dict[str, Any]) -> None:
    """Its state is that of one device, and complete on this rank."""
    state = step.state_dict()
    assert state["optimizer"]["state"].keys() == wanted["states"].keys() == state["ema"]["weights"].keys()
    assert state["ema"]["count"] == step.steps == len(wanted["losses"])
    for name, value in wanted["model"].items():
        near(state["model"][name], value)
    for name, values in wanted["states"].items():
        near(state["ema"]["weights"][name], wanted["ema"][name])
        for key, value in values.items():
            near(state["optimizer"]["state"][name][key], value)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    value = values_here(found)
    if value is not None:
        torch.testing.assert_close(value, wanted.detach(), rtol=1e-9, atol=1e-9)


# -- on ranks -----------------------------------------------------------------------------------------------------


def goes_on(folder: str, names: list[str]) -> None:
    """Two steps on each mesh, with a checkpoint in between, are the steps of one device."""
    wanted = alone(2 * len(names))
    numbers, before = itertools.count(), None
    for k, name in enumerate(names):
        step = made(name, seed=k)
        if before is not None:
            step.capture(**batch(0))
            step.load_state_dict(checkpoint.load(folder, step.state_dict()))
        for _ in range(2):
            number = next(numbers)
            assert abs(float(step(**batch(number))) - wanted["losses"][number]) < 1e-9
        checkpoint.save(folder, step.state_dict())
        if before is not None:
            before.parallel.close()
        before = step
    assert before is not None
    check(before, wanted)
    before.parallel.close()


def where_a_stage_is_frozen(frozen: int) -> None:
    """Counts are right on ranks that update nothing, whether they have an update or not."""
    step, wanted = made("pp4", frozen=frozen, stages=CUT), alone(3, frozen=frozen)
    for number in range(3):
        assert abs(float(step(**batch(number))) - wanted["losses"][number]) < 1e-9
    check(step, wanted)
    step.parallel.close()


def cut_again() -> None:
    """Two steps of one model and one optimizer, on different stages, and the plain model in between."""
    first, wanted = made("pp4"), alone(6)
    parallel, optimizer = first.parallel, first.optimizer
    second = parallel.train_step(optimizer, schedule="gpipe", microbatches=2, stages=CUT)
    identities = list(map(id, parallel.parameters()))
    for number in range(6):
        step = (first, second)[number % 2]
        assert abs(float(step(**batch(number))) - wanted["losses"][number]) < 1e-9
        if number == 2:
            with step.averaged(), torch.no_grad():
                assert parallel(**batch(9)).shape == ()
            assert all(p.device_mesh.size() == 1 for p in parallel.parameters())  # the call runs from stage to stage
        if number == 4:
            parallel.leave_stages()
            assert all(p.full_tensor().shape == p.shape for p in parallel.parameters())
    assert identities == list(map(id, parallel.parameters()))
    for name, value in wanted["model"].items():
        near(dict(parallel.named_parameters())[name], value)
    states = {name: optimizer.state[p] for name, p in parallel.named_parameters()}
    for name, values in wanted["states"].items():
        for key, value in values.items():
            near(states[name][key], value)
    parallel.close()


def same_everywhere(names: list[str]) -> None:
    """The state of a pipeline is loaded directly on each other mesh."""
    first = made(names[0])
    first(**batch(0))
    wanted = in_order({key: value for key, value in everything(first.state_dict()).items() if key != "rng"})
    steps = [first]
    for name in names[1:]:
        step = made(name, seed=5)
        step.load_state_dict(steps[-1].state_dict())
        step.capture(**batch(0))
        same(in_order({key: value for key, value in everything(step.state_dict()).items() if key != "rng"}), wanted)
        steps.append(step)
    for step in steps:
        step.parallel.close()
