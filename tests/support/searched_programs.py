"""Models whose plans are searched, and their programs without numbers."""

from __future__ import annotations

import functools

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar import Program
from autopar.capture import capture


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@functools.cache
def on_meta(name: str) -> Program:
    """The program of ``"mlp"`` or ``"llama"`` without numbers, in float32."""
    with torch.device("meta"):
        if name == "mlp":
            return capture(Mlp(), (torch.empty(4, 4, 8),)).program
        ids = torch.empty(4, 8, dtype=torch.long)
        return capture(llama(), (), {"input_ids": ids, "labels": ids}).program
