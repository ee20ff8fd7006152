"""Make the workloads of benchmarks and tests: models on the meta device, their programs and steps on a mesh of four."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

import autopar
from autopar import Mesh
from autopar.capture import capture
from autopar.capture.arguments import bind_arguments
from autopar.ir.layout import DistAttr
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.model.compiled import Compiler
from autopar.model.inputs import call_inputs
from autopar.optimizers import definition_of
from autopar.passes import Pass, Reshard, pipeline, run_passes
from autopar.plan.constraints import constraints
from autopar.plan.plan import Plan
from autopar.report.passes import PassReport, Reports
from autopar.runtime.localize import LocalPrograms
from autopar.step.compiling.compile import compile_micro
from autopar.step.compiling.compile_update import compile_update
from autopar.step.compiling.request import MicroRequest
from autopar.step.compiling.update import Trained
from autopar.step.options import options_of

MESH = Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}

LLAMA_PLAN: Plan = [
    "megatron",  # and over dp what it leaves whole: parameters and gradients are split over both axes, as in ZeRO-3
    {
        "*.[qkv]_proj.weight": ("tp", "dp"),
        "*.gate_proj.weight": ("tp", "dp"),
        "*.up_proj.weight": ("tp", "dp"),
        "*.o_proj.weight": ("dp", "tp"),
        "*.down_proj.weight": ("dp", "tp"),
        "*norm.weight": ("dp",),
        "*.embed_tokens.weight": ("dp", None),
        "*.lm_head.weight": ("dp", None),
    },
]
LLAMA_TRANSFERS = {  # what reshard inserts: of the whole model, and more with each layer
    "all_gather": (5, 18),
    "reduce_scatter": (3, 9),
    "all_reduce": (2, 6),
}

STEP = {"microbatches": 16, "amp": "fp16-O2", "loss_scale": 1024.0, "recompute": "blocks", "zero": 1, "clip_norm": 1.0}
STEP_PLAN = "megatron"
STEP_TRANSFERS = {
    "micro": {"cast": (11, 49), "all_reduce": (14, 7), "slice": (4, 3)},
    "update": {"reduce_scatter": (6, 18), "all_gather": (1, 2), "slice": (1, 2), "all_reduce": (6, 0)},
    "copy": {"all_gather": (2, 7)},
}


class Layer(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mlp(layers: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a residual MLP on the meta device: no memory, no arithmetic."""
    with torch.device("meta"):
        return nn.Sequential(*(Layer(512, 2048) for _ in range(layers))), torch.empty(8, 16, 512)


def llama(layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Llama-2-7B with another depth, on the meta device, and a batch of four sequences of 2048 with labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32, vocab_size=32000,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.empty(4, 2048, dtype=torch.long)
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def placed_llama(layers: int) -> Program:
    """Return the program of ``llama`` on ``MESH`` under ``LLAMA_PLAN``, as reshard is given it."""
    model, given = llama(layers)
    captured = capture(model, (), given)
    attrs, _ = constraints(LLAMA_PLAN, model, MESH, captured)
    run_passes(captured.program, before_reshard(pipeline(MESH, attrs)))
    return captured.program


def before_reshard(passes: list[Pass]) -> list[Pass]:
    return list(itertools.takewhile(lambda step: not isinstance(step, Reshard), passes))


@dataclass(frozen=True)
class Keeping(Compiler):
    """A compiler that keeps a copy of each program as reshard is given it."""

    placed: list[Program] = field(default_factory=list)

    def place(
        self, program: Program, attrs: Mapping[str, DistAttr], device: torch.device, **options: Any
    ) -> tuple[LocalPrograms, list[PassReport]]:
        self.placed.append(program.copy())
        run_passes(self.placed[-1], before_reshard(pipeline(self.mesh, attrs, device=device, **options)))
        return super().place(program, attrs, device, **options)


@dataclass(frozen=True)
class PlacedStep:
    """A training step's ``micro``, ``update`` and ``copy``, as ``reshard`` takes them.

    It also has what all passes did to the first two.
    """

    programs: dict[str, Program]
    reports: dict[str, Reports]


def placed_step(layers: int) -> PlacedStep:
    """Return the training step of ``llama`` with AdamW and the options ``STEP``, on ``MESH``.

    The batch is that of one micro-batch.
    """
    model, inputs = llama(layers)
    parallel = autopar.parallelize(model, MESH, STEP_PLAN)
    compiler = Keeping(**{field.name: getattr(parallel.compiler, field.name) for field in fields(Compiler)})
    options = options_of(STEP)
    call = call_inputs(bind_arguments(model, (), inputs), "global", MESH, lambda shapes: {})
    trained_names = [name for name, _ in model.named_parameters()]
    micro = compile_micro(compiler, MicroRequest(call, options, trained_names, {}, tuple(inputs)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    update = definition_of(optimizer).update(optimizer.param_groups[0])
    states = [name for name in update.states if name not in update.counted]
    trained = [
        Trained(
            name,
            type,
            micro.gradients[name],
            micro.states[name],
            update,
            dict.fromkeys(states, TensorType(type.shape, torch.float32)),
            0,
        )
        for name, type in micro.parameters.items()
    ]
    end = compile_update(compiler, trained, micro, options)
    _, first, copies, last = compiler.placed  # before them, what the micro-batches divide by
    return PlacedStep(
        {"micro": first, "update": last, "copy": copies},
        {"micro": Reports(micro.reports), "update": Reports(end.reports)},
    )
