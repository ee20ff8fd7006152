"""Train a small decoder on the ranks of a mesh, and beside it eager on the same device.

``ON`` says where: on CUDA with values; on CUDA under a library that computes nothing, where numbers are not compared;
or on CPUs, which shows that the trainings themselves are right.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

import autopar

VOCABULARY, HIDDEN, HEADS, LENGTH = 256, 128, 4, 64


@dataclass
class Device:
    """Where the cases of this process run.

    Attributes:
        name: of the device, as torch calls it.
        values: whether the device computes; without, numbers mean nothing.
    """

    name: str = "cuda"
    values: bool = True

    def wait(self) -> None:
        if self.name == "cuda":
            torch.cuda.synchronize()


ON = Device()


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.self_attn = Attention(dropout)
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.down_proj(functional.gelu(self.up_proj(self.post_attention_layernorm(x))))


class Decoder(nn.Module):
    """A causal language model that returns its loss; its names are those that presets know."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def decoder(dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options).to(ON.name, dtype)


def rows(count: int = 8, length: int = LENGTH) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (count, length), generator=made)
    return {"ids": ids.to(ON.name), "labels": ids.roll(-1, 1).to(ON.name)}


def optimizer_of(model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """AdamW whose update is smooth where a gradient is next to nothing, so that rounding stays rounding."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "eps": 1e-4, **options})


@dataclass(frozen=True)
class Training:
    """A training of a few steps.

    Attributes:
        mesh, plan, options: of ``parallelize``.
        step: options of ``train_step``; ``None`` for the plain loop.
        model: options of ``decoder``.
        optimizer: options of AdamW.
        autocast: whether the plain loop runs under ``torch.autocast``.
        rows: of the batch.
        tolerance: how far losses and parameters may be apart from eager's, relative to the largest number of each
            tensor.
    """

    mesh: Mapping[str, int]
    plan: Any = None
    step: Mapping[str, Any] | None = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    autocast: bool = False
    rows: int = 8
    steps: int = 4
    tolerance: float = 2e-5

    @property
    def precision(self) -> str:
        low = self.autocast or "amp" in (self.step or {})
        return "amp bf16" if low else "bf16" if self.model.get("dtype") == torch.bfloat16 else "f32"

    def run(self) -> float:
        """Train, and return how far losses and parameters are from eager's."""
        model, batch = decoder(**self.model), rows(self.rows)
        losses, single = self.alone(model, batch)
        found, parallel = self.on_mesh(model, batch)
        return max(apart(found, losses), parameters_apart(parallel, single))

    def on_mesh(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[list[float], Any]:
        parallel = put(model, self.mesh, self.plan, **self.options)
        optimizer = optimizer_of(parallel, self.optimizer)
        if self.step is None:
            return self._loop(parallel, optimizer, batch), parallel
        step = parallel.train_step(optimizer, **self.step)
        losses = [float(step(**batch)) for _ in range(self.steps)]
        step.finish()
        return losses, parallel

    def alone(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[list[float], nn.Module]:
        model = copy.deepcopy(model)
        return self._loop(model, optimizer_of(model, self.optimizer), batch), model

    def _loop(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]
    ) -> list[float]:
        losses = []
        clip = (self.step or {}).get("clip_norm") or (0.5 if self.autocast else None)
        for _ in range(self.steps):
            optimizer.zero_grad()
            with low_precision() if "bf16" in self.precision and "amp" in self.precision else contextlib.nullcontext():
                loss = model(**batch)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def put(model: nn.Module, mesh: Mapping[str, int], plan: Any = "ddp", **options: Any) -> Any:
    return autopar.parallelize(model, autopar.Mesh(mesh), plan, cache=False, timeout=40, **options)


def low_precision() -> torch.autocast:
    return torch.autocast(ON.name, dtype=torch.bfloat16)


def apart(found: Any, wanted: Any) -> float:
    """How far two numbers, tensors or lists of them are apart, relative to the largest number wanted."""
    a, b = (torch.as_tensor(x, dtype=torch.float64, device="cpu").detach() for x in (found, wanted))
    assert a.shape == b.shape, f"{tuple(a.shape)} beside {tuple(b.shape)}"
    if not ON.values or not a.numel():
        return 0.0
    assert a.isfinite().all(), "a number is not finite"
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


def parameters_apart(parallel: nn.Module, single: nn.Module) -> float:
    """How far the pieces that this rank holds are from those of a single device's parameters; on its device, too."""
    worst = 0.0
    wanted = dict(single.named_parameters())
    for name, parameter in parallel.named_parameters():
        here, there = parameter.detach(), wanted[name].detach()
        assert here.device.type == there.device.type, f"{name} is on {here.device}"
        if isinstance(here, DTensor):
            if here.device_mesh.get_coordinate() is None:
                continue
            there = distribute_tensor(there, here.device_mesh, here.placements, src_data_rank=None).to_local()
            here = here.to_local()
        worst = max(worst, apart(here, there))
    return worst


def check(worst: float, tolerance: float) -> None:
    if ON.values and not (math.isfinite(worst) and worst <= tolerance):
        raise AssertionError(f"apart from eager by {worst:.1e}, more than {tolerance:g}")
