"""Generate text with a Llama on four ranks: each rank keeps its pieces of the weights and of the cache.

    python -m autopar.examples.generate
    torchrun --nproc-per-node 4 -m autopar.examples.generate

The prompts have different lengths, with padding on the left. ``parallel.generate`` takes the options of the model's own
``generate``, and returns the same tokens on each rank: greedily, and with sampling from one seed.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.examples.on_ranks import compare, is_first, on_ranks

MESH = autopar.Mesh(dp=2, tp=2)  # dp splits the prompts, tp the heads
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 20}}


def made() -> torch.nn.Module:
    """Return a model with random weights, in the place of one that somebody has trained."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def prompts() -> dict[str, torch.Tensor]:
    """Return four prompts of 3 to 6 tokens."""
    lengths, generator = torch.tensor([3, 6, 4, 5]), torch.Generator().manual_seed(1)
    mask = (torch.arange(6) >= 6 - lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 64, (4, 6), generator=generator) * mask, "attention_mask": mask}


def generated(model: Any, way: str) -> torch.Tensor:
    """Return the prompts with ten new tokens; one line for the model and for the mesh."""
    torch.manual_seed(7)
    return model.generate(**prompts(), max_new_tokens=10, **WAYS[way])


def main() -> None:
    parallel = autopar.parallelize(made(), MESH, "megatron")
    ours = {way: generated(parallel, way) for way in WAYS}
    if is_first():
        print("cache:", parallel.generation)
        single = made()
        for way, tokens in ours.items():
            names = [f"prompt {k}" for k in range(len(tokens))]
            expected = generated(single, way)
            assert torch.equal(tokens, expected)
            compare(f"{way}, last", tokens[:, -1].tolist(), expected[:, -1].tolist(), names)
            print("new tokens of prompt 0:", *tokens[0, 6:].tolist())
    parallel.close()


if __name__ == "__main__":
    on_ranks(main)
