"""Whole training steps, simulated or on this rank, beside the loop of a single device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import loops
import torch
from casts import PromotedCasts
from equality import relative
from torch import nn
from transformers_models import bert, gpt2

import autopar
from autopar import Mesh
from autopar.costs.machine import Machine
from autopar.plan.loss_scaling import LossScaling

Batch = Mapping[str, torch.Tensor]


class Squared(nn.Module):
    """A model that returns its loss: the mean square of what another returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


class Pair(nn.Module):
    """A column-row pair and the mean square error of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def predicted(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return nn.functional.mse_loss(self.predicted(x), y)


def vectors(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {"x": torch.randn(12, 8, dtype=torch.float64)}


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[int], Batch], Any]] = {
    **loops.MODELS,
    "mlp": (lambda layers=2: Squared(loops.MODELS["mlp"][0](layers)), vectors, loops.MODELS["mlp"][2]),
    "resnet": (lambda layers=2: Squared(loops.MODELS["resnet"][0](layers)), loops.images, "ddp"),
    "gpt2": (lambda layers=1: gpt2(layers=layers), *loops.MODELS["gpt2"][1:]),  # of one layer: that of Llama are two
    "bert": (lambda layers=1: bert(layers=layers), *loops.MODELS["bert"][1:]),
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
                optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw, tolerance: float = 1e-9,
                called: bool = False, layers: int | None = None,
                searched_on: Machine | None = None) -> None:  # fmt: skip
    """Losses, norms, parameters, buffers and the optimizer's state equal those of a single device after so many
    steps, and parameters are the same objects.

    Args:
        searched_on: a machine on which the plan is searched, and splits something; else it is the model's own.
    """
    torch.manual_seed(0)
    make, batches, plan = MODELS[name]
    model = make() if layers is None else make(layers)
    if "tp" not in sizes:
        plan = "ddp"
    if searched_on is not None:
        plan = "search"
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), plan, machine=searched_on)
    objects = {name: id(p) for name, p in parallel.named_parameters()}
    step = parallel.train_step(optimizer(parallel), **options)
    single = Single(alone, optimizer(alone), options.get("clip_norm"))
    schedules = [torch.optim.lr_scheduler.StepLR(one.optimizer, 2, 0.5) for one in (step, single)]
    for k in range(count):
        batch = batches(k)
        ours, (loss, norm) = run(step, batch, called=called), single(**batch)
        for schedule in schedules:
            schedule.step()
        assert isinstance(ours, torch.Tensor) and relative(ours, loss) <= tolerance, (k, ours, loss)
        assert norm is None or relative(step.grad_norm, norm) <= tolerance, (k, step.grad_norm, norm)
    worst = differences(step, single)
    assert max(worst.values()) <= tolerance, {name: value for name, value in worst.items() if value > tolerance}
    assert step.captures == 1
    assert objects == {name: id(p) for name, p in parallel.named_parameters()}
    if searched_on is not None:
        assert step.solution.machine == searched_on
        assert any(f"/{axis}" in str(step.program.micro) for axis in sizes), "else this would test nothing"


class LowPrecision:
    """The loop of a single device in mixed precision, as people write it: O1 is ``torch.autocast``; O2 a model in low
    precision that takes its parameters from those in float32, and hands its gradients to them. fp16 with a
    ``GradScaler``. ``amp=None``: in float32.

    Attributes:
        scales: the scale after each step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, amp: str | None, scaling: LossScaling, *,
                 clip_norm: float | None = None, microbatches: int = 1) -> None:  # fmt: skip
        self.model, self.optimizer, self.amp, self.clip_norm, self.microbatches = (
            model,
            optimizer,
            amp or "",
            clip_norm,
            microbatches,
        )
        self.dtype = torch.float16 if self.amp.startswith("fp16") else torch.bfloat16
        self.low = copy.deepcopy(model).to(self.dtype) if self.amp.endswith("O2") else model
        self.scaler = torch.amp.GradScaler(
            "cpu",
            scaling.initial,
            scaling.growth,
            scaling.backoff,
            scaling.interval,
            enabled=self.amp.startswith("fp16"),
        )
        self.scales: list[float] = []

    def __call__(self, **batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and the norm of the gradients before they are clipped."""
        cut = {name: tensor.chunk(self.microbatches) for name, tensor in batch.items()}
        labels = (
            [(part[:, 1:] != -100).sum() for part in cut["labels"]]
            if "labels" in cut
            else [torch.tensor(1)] * self.microbatches
        )
        total = torch.zeros(())
        for k, count in enumerate(labels):
            given = {name: parts[k] for name, parts in cut.items()}
            if self.low is not self.model:
                given = {
                    name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
                    for name, tensor in given.items()
                }
            with torch.autocast("cpu", self.dtype, enabled=self.amp.endswith("O1")):
                found = self.low(**given)
            loss = (found if isinstance(found, torch.Tensor) else found.loss).float() * count / sum(labels)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if self.low is not self.model:
            for master, low in zip(self.model.parameters(), self.low.parameters(), strict=True):
                master.grad, low.grad = low.grad.float(), None
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(
            self.model.parameters(), float("inf") if self.clip_norm is None else self.clip_norm
        )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        self.optimizer.zero_grad()
        if self.low is not self.model:
            with torch.no_grad():
                for master, low in zip(self.model.parameters(), self.low.parameters(), strict=True):
                    low.copy_(master)
        return total, norm


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(loops.groups_of(model), lr=0.1, momentum=0.9)


def narrow(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


def distance(a: nn.Module, b: nn.Module) -> float:
    """The norm of all differences between their parameters."""
    return float(
        torch.cat(
            [
                (loops.whole(p) - loops.whole(q)).detach().flatten()
                for p, q in zip(a.parameters(), b.parameters(), strict=True)
            ]
        ).norm()
    )


def mixed_alike(name: str, sizes: dict[str, int], amp: str, options: dict[str, Any],
                optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, parameters: float = 2.0,
                count: int = 5, searched_on: Machine | None = None) -> None:  # fmt: skip
    """Steps in mixed precision are about as far from float32 as those of a single device: parameters at most
    ``parameters`` times as far and at least a third; losses and norms at most three times as far, or a rounding of the
    low precision. With ``searched_on``, a machine, the plan is searched."""
    torch.manual_seed(0)
    make, batches, plan = MODELS[name]
    model = make().float()
    begin = copy.deepcopy(model)
    exact, low = (
        LowPrecision(
            own := copy.deepcopy(model), optimizer(own), one, LossScaling(1024.0), clip_norm=options["clip_norm"]
        )
        for one in (None, amp)
    )
    plan = "search" if searched_on is not None else plan if "tp" in sizes else "ddp"
    parallel = autopar.parallelize(model, Mesh(sizes), plan, machine=searched_on)
    step = parallel.train_step(
        optimizer(parallel), amp=amp, **({"loss_scale": 1024.0} if amp.startswith("fp16") else {}), **options
    )
    rounding = torch.finfo(low.dtype).eps / 2
    for k in range(count):
        batch = narrow(batches(k))
        loss = run(step, batch, promoted=False)
        ours, (exactly, lowly) = (loss, step.grad_norm), (single(**batch) for single in (exact, low))
        assert loss.dtype == torch.float32 and not step.skipped
        for a, b, c in zip(ours, exactly, lowly, strict=True):
            assert relative(a, b) <= max(3 * relative(c, b), rounding), (k, a, b, c)
    tensors = [
        *parallel.parameters(),
        *parallel.state_dict().values(),
        *(t for one in step.optimizer.state.values() for t in one.values()),
    ]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}, "master weights"
    noise, found, moved = (
        distance(low.model, exact.model),
        distance(parallel, exact.model),
        distance(begin, exact.model),
    )
    assert noise < 0.2 * moved and noise / 3 <= found <= parameters * noise, (noise, found, moved)


def overflows_alike(sizes: dict[str, int], amp: str, zero: int) -> None:
    """The first scale is far too large and falls until gradients fit; every third step it rises, too far. All as
    torch's GradScaler has it.

    The factors are large so that no scale is near the largest that fits: ranks add up fewer rows, and that is another
    for them.
    """
    torch.manual_seed(0)
    make, batches, plan = MODELS["mlp"]
    model = make().float()
    scaling = LossScaling(initial=2.0**30, growth=2.0**8, backoff=2.0**-8, interval=3)
    single = LowPrecision(own := copy.deepcopy(model), adamw(own), amp, scaling, clip_norm=0.5, microbatches=2)
    parallel = autopar.parallelize(model, Mesh(sizes), plan if "tp" in sizes else "ddp")
    step = parallel.train_step(adamw(parallel), amp=amp, loss_scale=scaling, zero=zero, microbatches=2, clip_norm=0.5)
    begin = copy.deepcopy(own)
    scales, skipped = [], []
    for k in range(8):
        batch = narrow(batches(k))
        before = _all_of(step)
        run(step, batch, promoted=False), single(**batch)
        after = _all_of(step)
        skipped.append(bool(step.skipped))
        if skipped[-1]:
            assert all(torch.equal(before[name], after[name]) for name in before), "nothing is changed, bit for bit"
            assert not any(tensor.any() for name, tensor in after.items() if name not in before), (
                "the first step makes the optimizer's state"
            )
        else:
            assert before.keys() == after.keys() and not all(torch.equal(before[name], after[name]) for name in before)
        scales.append(float(step.scaler[0]))
    assert skipped == [True, True, False, False, False, True, False, False]
    assert scales == single.scales == [2.0**22, 2.0**14, 2.0**14, 2.0**14, 2.0**22, 2.0**14, 2.0**14, 2.0**14]
    assert step.steps == 8 and {float(one["step"]) for one in step.optimizer.state.values()} == {5.0}
    assert distance(parallel, own) <= 0.02 * distance(begin, own)


def _all_of(step: Any) -> dict[str, torch.Tensor]:
    """Copies of parameters and of the optimizer's state."""
    found = {name: p.detach() for name, p in step.parallel.named_parameters()}
    found |= {
        f"{name}.{key}": value
        for name, p in step.parallel.named_parameters()
        for key, value in step.optimizer.state.get(p, {}).items()
    }
    return {name: loops.whole(tensor).clone() for name, tensor in found.items()}
