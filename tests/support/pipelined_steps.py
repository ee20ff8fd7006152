"""Whole training steps in stages, simulated or on this rank, beside the loop of a single device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import loops
import torch
from casts import PromotedCasts
from equality import relative
from steps import run
from torch import nn
from transformers_models import bert, gpt2, llama

import autopar
from autopar import Mesh
from autopar.pipeline import PipelineSchedule
from autopar.runtime.dtensors import is_dtensor

MESHES = {"pp2 tp2": {"pp": 2, "tp": 2}, "pp4": {"pp": 4}, "pp2 dp2": {"pp": 2, "dp": 2}, "pp3": {"pp": 3}}
CLASSES = 11


class Layers(nn.Module):
    """Layers one after the other, and their loss. It uses no library, and is traced fast."""

    def __init__(self, layers: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, CLASSES)

    def layer(self, dim: int) -> nn.Module:
        return nn.Sequential(nn.Linear(dim, dim), nn.Tanh())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


class Skip(Layers):
    """What enters the first layer is read again behind the last."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = first = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x * first + first), y)


class Bare(Skip):
    """The same; a layer more, which may be a stage: its backward only hands on what it receives."""

    def __init__(self, layers: int = 4, dim: int = 8) -> None:
        super().__init__(layers, dim)
        self.layers[0] = nn.Linear(dim, dim)


class Penalized(Layers):
    """The loss has a penalty on weights of the first and the last stage: the last one has gradients of both."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = self.layers[0][0].weight, self.layers[-1][0].weight
        return super().forward(x, y) + 0.1 * weights[0].square().sum() + 0.2 * weights[1].square().sum()


class Streams(Layers):
    """Two streams, which are added before the last layer: there is a gradient that one stage reads and hands on."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        side = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.layers[-1](x + side)), y)


class Wide(Layers):
    """Residual layers with few values and large weights, so that a search keeps values whole and splits weights."""

    def layer(self, dim: int) -> nn.Module:
        return nn.Sequential(nn.Linear(dim, 8 * dim), nn.Tanh(), nn.Linear(8 * dim, dim))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


class Normed(Layers):
    """Batch norms: each micro-batch writes their buffers."""

    def layer(self, dim: int) -> nn.Module:
        return nn.Sequential(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.Tanh())


class Shared(Layers):
    """The first layer, one between and the last have one weight."""

    def __init__(self, layers: int = 4, dim: int = 8) -> None:
        super().__init__(layers, dim)
        for k in (layers // 2, layers - 1):
            self.layers[k][0].weight = self.layers[0][0].weight


class Noisy(Layers):
    """Dropout in each layer."""

    def layer(self, dim: int) -> nn.Module:
        return nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Dropout(0.3))


def text(rows: int) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda step: loops.text(step, rows)


def vectors(rows: int) -> Callable[[int], dict[str, torch.Tensor]]:
    """Batches with unequal numbers of labels in their rows."""

    def batch(step: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(step)
        y = torch.randint(0, CLASSES, (rows,))
        y[1::3] = -100
        return {"x": torch.randn(rows, 8, dtype=torch.float64), "y": y}

    return batch


Make = Callable[[int], nn.Module]  # from the number of layers
MODELS: dict[str, tuple[Make, Callable[[int], Any], str | None]] = {  # … its batches, its plan with tp
    "layers": (lambda layers: Layers(layers).double(), vectors, None),
    "skip": (lambda layers: Skip(layers).double(), vectors, None),
    "streams": (lambda layers: Streams(layers).double(), vectors, None),
    "wide": (lambda layers: Wide(layers).double(), vectors, None),
    "bare": (lambda layers: Bare(layers + 1).double(), vectors, None),
    "penalized": (lambda layers: Penalized(layers).double(), vectors, None),
    "normed": (lambda layers: Normed(layers).double(), vectors, None),
    "shared": (lambda layers: Shared(layers).double(), vectors, None),
    "noisy": (lambda layers: Noisy(layers).double(), vectors, None),
    "llama": (lambda layers: llama(kv=2, layers=layers), text, "megatron"),
    "llama tied": (lambda layers: llama(kv=2, layers=layers, tie_word_embeddings=True), text, "megatron"),
    "gpt2": (lambda layers: gpt2(layers=layers), text, "megatron"),
    "bert": (lambda layers: bert(layers=layers), text, "megatron"),
}
SPLIT = {"layers.*.0.weight": ("tp", None), "layers.*.0.bias": ("tp",), "head.weight": (None, "tp")}


def plan_of(name: str, sizes: Mapping[str, int]) -> Any:
    """The plan of a model on the ranks of a stage."""
    if "tp" in sizes:
        return MODELS[name][2] or SPLIT
    return "ddp" if "dp" in sizes else {}


class Alone:
    """The loop of a single device, over the whole batch at once.

    If the model has batch norms, it goes micro-batch by micro-batch, with the mean of the losses over all labels.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: int,
                 clip_norm: float | None = None) -> None:  # fmt: skip
        self.model, self.optimizer, self.clip_norm = model, optimizer, clip_norm
        self.parts = microbatches if any(isinstance(m, nn.BatchNorm1d) for m in model.modules()) else 1

    def __call__(self, **batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        cut = {name: tensor.chunk(self.parts) for name, tensor in batch.items()}
        total = torch.zeros((), dtype=torch.float64)
        for k in range(self.parts):
            with PromotedCasts():
                found = self.model(**{name: parts[k] for name, parts in cut.items()})
            loss = found if isinstance(found, torch.Tensor) else found.loss
            if self.parts > 1:
                counts = [int(y.ne(-100).sum()) for y in cut["y"]]
                loss = loss * counts[k] / sum(counts)
            loss.backward()
            total += loss.detach()
        norm = None if self.clip_norm is None else nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(loops.groups_of(model), lr=1e-2)


def made(name: str, sizes: Mapping[str, int], schedule: str | PipelineSchedule, microbatches: Any, *, layers: int = 4,
         make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw, rows: int = 2,
         prepare: Callable[[nn.Module], Any] = lambda model: None, plan: Any = None, inputs: Any = "global",
         **options: Any) -> tuple[Any, Alone, Callable[[int], Any]]:  # fmt: skip
    """A step in stages, the loop of a single device, and batches.

    Args:
        microbatches: how many; or ``"search"`` among 1, 2 and other divisors of a batch of two micro-batches.
        rows: of a micro-batch.
        prepare: changes the model before.
    """
    torch.manual_seed(0)
    make, batches, _ = MODELS[name]
    model = make(layers)
    prepare(model)
    own = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), plan_of(name, sizes) if plan is None else plan,
                                   inputs=inputs)  # fmt: skip
    step = parallel.train_step(make_optimizer(parallel), microbatches=microbatches, schedule=schedule, **options)
    count = 2 if microbatches == "search" else microbatches
    alone = Alone(own, make_optimizer(own), count, options.get("clip_norm"))
    return step, alone, batches(rows * count)


def is_here(tensor: torch.Tensor) -> bool:
    """Whether this rank is on the mesh of a tensor. Else its piece is empty."""
    here = not is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is not None
    assert here or not tensor.to_local().numel()
    return here


def differences(step: Any, alone: Alone) -> dict[str, float]:
    """How far parameters, buffers and the optimizer's state are from those of a single device, on the ranks that have
    them; all ranks have all names."""
    pairs = []
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = getattr(step.parallel, kind)(), getattr(alone.model, kind)()
        for (name, a), (other, b) in zip(ours, theirs, strict=True):
            assert name == other
            pairs.append((name, a, b))
    one, other = step.optimizer.state_dict(), alone.optimizer.state_dict()
    assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
    for k, state in other["state"].items():
        assert state.keys() == one["state"][k].keys()
        pairs += [(f"{k}.{name}", one["state"][k][name], value) for name, value in state.items()]
    return {name: relative(loops.whole(a), b) for name, a, b in pairs if is_here(a)}


def pipelined_alike(name: str, sizes: Mapping[str, int], schedule: str | PipelineSchedule, microbatches: Any,
                    count: int = 10, tolerance: float = 1e-9, called: bool = False,
                    **options: Any) -> Any:  # fmt: skip
    """Losses, norms, parameters, buffers and the optimizer's state equal those of a single device after so many steps,
    and parameters are the same objects. Returns the step."""
    step, alone, batches = made(name, sizes, schedule, microbatches, **options)
    objects = {name: id(p) for name, p in step.parallel.named_parameters()}
    for k in range(count):
        ours, (loss, norm) = run(step, batches(k), called=called), alone(**batches(k))
        assert isinstance(ours, torch.Tensor) and relative(ours, loss) <= tolerance, (k, ours, loss)
        assert norm is None or relative(step.grad_norm, norm) <= tolerance, (k, step.grad_norm, norm)
    worst = differences(step, alone)
    assert max(worst.values()) <= tolerance, {name: value for name, value in worst.items() if value > tolerance}
    assert step.captures == 1
    assert objects == {name: id(p) for name, p in step.parallel.named_parameters()}
    return step
