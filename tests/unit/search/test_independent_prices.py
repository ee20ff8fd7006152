"""A searched plan under the prices of others: it is not far behind the best preset there either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from independent_prices import of_dtensor, ring, seconds
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar import Mesh
from autopar.capture import capture
from autopar.passes import pipeline, run_passes
from autopar.search.starts.starting_points import starting_points

H100 = "NVIDIA H100 80GB HBM3"
BEHIND = 1.02


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """One layer of Llama-3-8B with a small vocabulary; its attention is made of matrix products, which torch counts."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=2048, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    ids = torch.zeros(8, 2048, dtype=torch.long)
    return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": ids, "labels": ids}


def mlp() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096), nn.LayerNorm(4096))
    return model.to(torch.bfloat16), {"input": torch.zeros(4096, 4096, dtype=torch.bfloat16)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "mesh"),
    [pytest.param(llama, Mesh(a=2, b=4), marks=pytest.mark.sweep("llama is on seven ranks, and mlp on this mesh")),
     (llama, Mesh(a=7)), (mlp, Mesh(a=2, b=4)), (mlp, Mesh(a=4, b=8)), (mlp, Mesh(a=7))],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_a_searched_plan_is_not_far_behind_the_best_preset(make: Any, mesh: Mesh) -> None:
    with torch.device("meta"):
        model, inputs = make()
        captured = capture(model, (), inputs)

    def priced(plan: Mapping[str, Any] | None) -> list[float]:
        program = captured.program.copy()
        run_passes(program, pipeline(mesh, plan, search=plan is None, machine=H100))
        return [seconds(program, ring), seconds(program, of_dtensor)]

    searched = priced(None)
    presets = [priced(attrs) for _, attrs in starting_points(model, captured, mesh)]
    for ours, theirs in zip(searched, zip(*presets, strict=True), strict=True):
        assert ours <= BEHIND * min(theirs), (searched, presets)
