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


def halved(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


class LowPrecision:
    """The loop of a single device in mixed precision, as people write it: O1 is ``torch.autocast``; O2 a model in low precision that
    takes its parameters from those in float32, and hands its gradients to them. fp16 with a ``GradScaler``.

    Attributes:
        scales: the scale after each step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, amp: str | None, clip_norm: float | None = None, scale: float = 1024.0,
                 microbatches: int = 1) -> None:  # fmt: skip
        self.model, self.optimizer, self.amp, self.clip_norm, self.microbatches = model, optimizer, amp or "", clip_norm, microbatches
        self.dtype = torch.float16 if self.amp.startswith("fp16") else torch.bfloat16
        self.low = halved(model, self.dtype) if self.amp.endswith("O2") else model
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=self.amp.startswith("fp16"))
        self.scales: list[float] = []

    def __call__(self, **batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and the norm of the gradients before they are clipped."""
        total = torch.zeros(())
        cut = {name: tensor.chunk(self.microbatches) for name, tensor in batch.items()}
        labels = sum((part[..., 1:] != -100).sum() for part in cut["labels"]) if "labels" in cut else None
        for k in range(self.microbatches):
            given = {name: parts[k] for name, parts in cut.items()}
            share = 1 / self.microbatches if labels is None else (given["labels"][..., 1:] != -100).sum() / labels
            if self.low is not self.model:
                given = {name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in given.items()}
            with torch.autocast("cpu", self.dtype, enabled=self.amp.endswith("O1")):
                found = self.low(**given)
            loss = (found if isinstance(found, torch.Tensor) else found.loss).float() * share
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if self.low is not self.model:
            for master, low in zip(self.model.parameters(), self.low.parameters(), strict=True):
                master.grad, low.grad = low.grad.float(), None
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm or float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        self.optimizer.zero_grad()
        if self.low is not self.model:
            with torch.no_grad():
                for master, low in zip(self.model.parameters(), self.low.parameters(), strict=True):
                    low.copy_(master)
        return total, norm


def narrow(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


def noise_of(name: str, sizes: dict[str, int], amp: str, options: dict[str, Any], count: int = 5,
             optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> dict[str, tuple[float, float]]:  # fmt: skip
    """How far steps in mixed precision are from a single device's in float32, and how far a single device's own mixed precision is: of
    losses and norms the largest relative distance of any step, of parameters that of all together, of how far they have moved."""
    torch.manual_seed(0)
    make, batches, plan = MODELS[name]
    model = make().float()
    begin = [p.detach().clone() for p in model.parameters()]
    alone = [LowPrecision(own := copy.deepcopy(model), optimizer(own), one, options.get("clip_norm")) for one in (None, amp)]
    parallel = autopar.parallelize(model, Mesh(sizes), plan if "tp" in sizes else None)
    step = parallel.train_step(optimizer(parallel), amp=amp, loss_scale=1024.0, **options)
    found: dict[str, list[tuple[float, float]]] = {"loss": [], "norm": []}
    for k in range(count):
        batch = narrow(batches(k))
        loss = run(step, batch, promoted=False)
        (exact, exact_norm), (low, low_norm) = (single(**batch) for single in alone)
        assert loss.dtype == torch.float32 and not step.skipped
        found["loss"].append((relative(loss, exact), relative(low, exact)))
        found["norm"].append((relative(step.grad_norm, exact_norm), relative(low_norm, exact_norm)))
    assert all(p.dtype == torch.float32 for p in parallel.parameters()), "master weights"
    assert all(tensor.dtype == torch.float32 for tensor in parallel.state_dict().values() if tensor.is_floating_point())
    ours, exactly, lowly = ([loops.whole(p).detach() for p in one.parameters()] for one in (parallel, *(single.model for single in alone)))
    moved = _norm([a - b for a, b in zip(exactly, begin, strict=True)])
    distances = tuple(float(_norm([a - b for a, b in zip(some, exactly, strict=True)]) / moved) for some in (ours, lowly))
    return {"parameters": distances, **{name: (max(a for a, _ in pairs), max(b for _, b in pairs)) for name, pairs in found.items()}}  # type: ignore[dict-item]


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt()
