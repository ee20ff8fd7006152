"""Fine-tune a pretrained model that need not fit on one device, from a folder of ``save_pretrained`` to another one.

    python -m autopar.examples.finetune
    torchrun --nproc-per-node 4 -m autopar.examples.finetune

The model is made on meta, without memory. Each rank reads its own pieces from the folder, and nothing else.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import autopar
from autopar.examples.on_ranks import compare, is_first, on_ranks, shared_folder

MESH = autopar.Mesh(dp=2, tp=2)
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4
}  # fmt: skip


def pretrained(folder: Path) -> None:
    """Write a model with random weights, in the place of one that somebody has trained."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (8, 16), generator=generator) for _ in range(count)]


def on_mesh(folder: Path, tuned: Path) -> list[float]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder))
    parallel = autopar.parallelize(model, MESH, "fsdp+tp")
    parallel.load_weights(folder)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    step = parallel.train_step(optimizer, microbatches=2, clip_norm=1.0)
    losses = [step(input_ids=ids, labels=ids).item() for ids in batches(4)]
    parallel.save_pretrained(tuned)  # all ranks call it; the first rank gathers the weights, and writes
    parallel.close()
    return losses


def on_one_device(folder: Path) -> tuple[torch.nn.Module, list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids in batches(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def main() -> None:
    logging.disable_progress_bar()
    with shared_folder() as shared:
        folder, tuned = shared / "pretrained", shared / "tuned"
        if is_first():
            pretrained(folder)
        dist.barrier()  # until it is there
        ours = on_mesh(folder, tuned)
        if is_first():
            model, single = on_one_device(folder)
            compare("loss", ours, single, tolerance=1e-4)
            loaded = AutoModelForCausalLM.from_pretrained(tuned)  # plain transformers
            torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=1e-3, atol=1e-3)
            print("transformers has loaded", *sorted(os.listdir(tuned)))


if __name__ == "__main__":
    on_ranks(main)
