"""Make small Hugging Face models with random weights, and batches for them.

Each function imports its model: that takes three seconds, and many tests import this module for others.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from casts import promoted_casts  # noqa: F401
from torch import nn

VOCABULARY = 22
float64 = pytest.mark.usefixtures("promoted_casts")


def llama(heads: int = 4, kv: int = 4, head: int = 4, hidden: int = 24, layers: int = 1, **more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=heads * head, intermediate_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0,
        **{"use_cache": False, **more},
    )).double()  # fmt: skip


def gpt2(heads: int = 4, width: int = 16, layers: int = 1, **more: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, vocab_size=VOCABULARY, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **more,
    )).double()  # fmt: skip


def bert(layers: int = 1) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=24, vocab_size=VOCABULARY,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )).double()  # fmt: skip


def batch(rows: int = 4, length: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (rows, length))
    labels = ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "labels": labels}
