"""Whole training steps, simulated or on this rank, beside the loop of a single device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import loops
import torch
from casts import PromotedCasts
from test_equality import relative
from torch import nn

import autopar
from autopar import Mesh

Batch = Mapping[str, torch.Tensor]


class Squared(nn.Module):
    """A model that returns its loss: the mean square of what another returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def vectors(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {"x": torch.randn(12, 8, dtype=torch.float64)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Any]] = {
    **loops.MODELS,
    "mlp": (lambda: Squared(loops.MODELS["mlp"][0]()), vectors, loops.MODELS["mlp"][2]),
    "resnet": (lambda: Squared(loops.MODELS["resnet"][0]()), loops.images, None),
}


class Single:
    """The loop of a single device, over the whole batch at once."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None = None) -> None:
        self.model, self.optimizer, self.clip_norm = model, optimizer, clip_norm

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        with PromotedCasts():
            found = self.model(*args, **kwargs)
        loss = found if isinstance(found, torch.Tensor) else found.loss
        loss.backward()
        norm = None if self.clip_norm is None else nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(loops.groups_of(model), lr=1e-2)


def run(step: Any, *args: Any, promoted: bool = True, called: bool = False, **kwargs: Any) -> torch.Tensor:
    """One step: simulated where this process is alone, unless it is to be called."""
    with PromotedCasts() if promoted else contextlib.nullcontext():
        return (step.simulate if step.parallel.job is None and not called else step)(*args, **kwargs)


def differences(step: Any, single: Single) -> dict[str, float]:
    """How far parameters, buffers and the optimizer's state are from those of a single device."""
    found = {}
    ours, theirs = step.parallel, single.model
    for kind in ("named_parameters", "named_buffers"):
        for (name, a), (_, b) in zip(getattr(ours, kind)(), getattr(theirs, kind)(), strict=True):
            found[name] = relative(loops.whole(a), b)
    a, b = step.optimizer.state_dict(), single.optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for k, state in b["state"].items():
        assert state.keys() == a["state"][k].keys()
        found |= {f"{k}.{name}": relative(loops.whole(a["state"][k][name]), value) for name, value in state.items()}
    return found


def steps_alike(name: str, sizes: dict[str, int], options: dict[str, Any], count: int = 10,
                optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw, tolerance: float = 1e-9, called: bool = False) -> None:  # fmt: skip
    """Losses, norms, parameters, buffers and the optimizer's state equal those of a single device after so many steps."""
    torch.manual_seed(0)
    make, batches, plan = MODELS[name]
    model = make()
    if "tp" not in sizes:
        plan = None
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), plan)
    step = parallel.train_step(optimizer(parallel), **options)
    single = Single(alone, optimizer(alone), options.get("clip_norm"))
    schedules = [torch.optim.lr_scheduler.StepLR(one.optimizer, 3, 0.5) for one in (step, single)]
    for k in range(count):
        batch = batches(k)
        ours, (loss, norm) = run(step, batch, called=called), single(**batch)
        for schedule in schedules:
            schedule.step()
        assert type(ours) is torch.Tensor and relative(ours, loss) <= tolerance, (k, ours, loss)
        assert norm is None or relative(step.grad_norm, norm) <= tolerance, (k, step.grad_norm, norm)
    worst = differences(step, single)
    assert max(worst.values()) <= tolerance, {name: value for name, value in worst.items() if value > tolerance}
    assert step.captures == 1
