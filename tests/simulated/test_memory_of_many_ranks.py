"""The memory of a rank does not grow with the number of ranks, if each has as many rows."""

from __future__ import annotations

import pytest
import torch
from transformers_models import bert, gpt2, llama

import autopar

MODELS = {"llama": lambda: llama(kv=2, layers=2), "gpt2": lambda: gpt2(layers=2), "bert": lambda: bert(layers=2)}
SEQUENCE = 32  # so long that the mask of attention counts


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_memory_does_not_grow_with_the_ranks(name: str) -> None:
    """The mask of attention is computed from positions, and not from the rows of a rank. A few vectors stay whole."""
    with torch.device("meta"):
        model = MODELS[name]().float()
    peaks = []
    for ranks in (2, 16):
        rows = torch.zeros(ranks, SEQUENCE, dtype=torch.int64, device="meta")
        example = {"input_ids": rows, "labels": rows}
        parallel = autopar.parallelize(model, autopar.Mesh(dp=ranks, tp=2), "megatron")
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
        step.capture(**example)
        peaks.append(step.memory(0).peak)
    assert peaks[1] <= 1.05 * peaks[0], peaks
