"""What the benchmarks run on."""

from __future__ import annotations

import torch
from torch import nn

from autopar import Mesh

MESH = Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}


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
