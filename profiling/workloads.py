"""What the benchmarks run on."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from autopar import Mesh
from autopar.capture import capture
from autopar.constraints import constraints
from autopar.passes import Reshard, pipeline, run_passes
from autopar.program import Program

MESH = Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}

LLAMA_PLAN = [
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
    "all_reduce": (4, 6),
    "slice": (0, 2),
}


class Layer(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def mlp(layers: int) -> tuple[nn.Module, torch.Tensor]:
    """A residual MLP on the meta device: no memory, no arithmetic."""
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
    """The program of ``llama`` on ``MESH`` under ``LLAMA_PLAN``, as reshard is given it."""
    model, given = llama(layers)
    captured = capture(model, (), given)
    attrs, _ = constraints(LLAMA_PLAN, model, MESH, captured)
    run_passes(captured.program, itertools.takewhile(lambda step: not isinstance(step, Reshard), pipeline(MESH, attrs)))
    return captured.program
