"""Build the model that is trained: a Llama with random weights, which depend only on its size and the seed."""

from __future__ import annotations

import torch

from autopar.cli.train.sizes import VOCABULARY, Size


def llama(size: Size, positions: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Build Hugging Face's Llama, unchanged.

    Its weights are drawn on the CPU, so that they are the same on every device.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        max_position_embeddings=positions, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model.to(device=device, dtype=dtype)
