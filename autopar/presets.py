"""Presets: plans that have a name. Each is data; a plan may build on one: ``plan=["megatron", {"*.head.weight": ("tp", None)}]``.

``megatron`` splits each pair of matrix products over ``tp``: the first by columns, the second by rows (Shoeybi et al.,
arXiv:1909.08053). ``megatron+sp`` also splits the sequence between them over ``tp`` (Korthikanti et al.,
arXiv:2205.05198). Entries whose names a model does not have are passed over.
"""

from __future__ import annotations

from autopar.spec import Spec

Plan = dict[str, Spec]

QKV = "(3 -1/tp)"  # query, key and value in one weight, each split by itself
PAIR = "(2 -1/tp)"  # gate and up in one weight

KINDS: dict[str, dict[str, Spec]] = {  # of a linear layer: what its parameters are
    "column": {"weight": ("tp", None), "bias": ("tp",)},
    "row": {"weight": (None, "tp")},
    "three columns": {"weight": (QKV, None), "bias": (QKV,)},
    "two columns": {"weight": (PAIR, None), "bias": (PAIR,)},
    "column, transposed": {"weight": (None, "tp"), "bias": ("tp",)},
    "row, transposed": {"weight": ("tp", None)},
    "three columns, transposed": {"weight": (None, QKV), "bias": (QKV,)},
}

LAYERS: tuple[tuple[str, str, str], ...] = (  # of whom, kind, the names
    ("Llama, Mistral, Qwen, Gemma, OPT, Phi", "column", "q_proj k_proj v_proj gate_proj up_proj fc1"),
    ("Llama, Mistral, Qwen, Gemma, OPT, Phi", "row", "o_proj out_proj down_proj self_attn.dense fc2"),
    ("Phi-3", "three columns", "qkv_proj"),
    ("Phi-3", "two columns", "gate_up_proj"),
    ("GPT-2", "three columns, transposed", "attn.c_attn"),
    ("GPT-2", "column, transposed", "mlp.c_fc"),
    ("GPT-2", "row, transposed", "attn.c_proj mlp.c_proj"),
    ("GPT-J", "column", "fc_in"),
    ("GPT-J", "row", "fc_out"),
    ("GPT-NeoX, Falcon, Bloom: heads with a query, key and value each", "column", "query_key_value dense_h_to_4h"),
    ("GPT-NeoX, Falcon, Bloom", "row", "attention.dense self_attention.dense dense_4h_to_h"),
    ("BERT, ViT", "column", "query key value intermediate.dense"),
    ("BERT, ViT", "row", "attention.output.dense layer.*.output.dense"),
    ("DistilBERT", "column", "q_lin k_lin v_lin lin1"),
    ("DistilBERT", "row", "out_lin lin2"),
    ("T5", "column", "SelfAttention.q SelfAttention.k SelfAttention.v EncDecAttention.q EncDecAttention.k EncDecAttention.v"),
    ("T5", "column", "DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1"),
    ("T5", "row", "SelfAttention.o EncDecAttention.o DenseReluDense.wo"),
    ("all: the vocabulary", "column", "embed_tokens wte word_embeddings shared embed_in"),
    ("all: the head", "column", "lm_head embed_out predictions.decoder"),
    ("torch.nn.TransformerEncoderLayer", "column", "linear1"),
    ("torch.nn.TransformerEncoderLayer", "row", "linear2"),
)

MEGATRON: Plan = {
    f"*.{layer}.{parameter}": spec
    for _, kind, layers in LAYERS
    for layer in layers.split()
    for parameter, spec in KINDS[kind].items()
} | {"*.in_proj_weight": (QKV, None), "*.in_proj_bias": (QKV,)}  # torch.nn.MultiheadAttention

RESIDUAL = (  # modules that begin the residual stream, or return what is added to it
    "embed_tokens", "wte", "shared", "word_embeddings", "embed_in", "embeddings", "o_proj", "out_proj", "down_proj",
    "self_attn.dense", "c_proj", "fc_out", "attention.dense", "self_attention.dense", "dense_4h_to_h", "out_lin", "lin2",
    "attention.output.dense", "layer.*.output.dense", "SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo",
)  # fmt: skip

SEQUENCE: Plan = {f"*.{module}()": ("?", "tp", None) for module in RESIDUAL}

PRESETS: dict[str, Plan] = {
    "ddp": {},  # parameters whole, and the batch split, as without a plan
    "megatron": MEGATRON,
    "megatron+sp": MEGATRON | SEQUENCE,
}
