"""Presets: plans that have a name. Each is data; a plan may build on one: ``plan=["megatron", {"*.head.weight": ("tp", None)}]``.

``megatron`` splits each pair of matrix products over ``tp``: the first by columns, the second by rows (Shoeybi et al.,
arXiv:1909.08053). ``megatron+sp`` also splits the sequence between them over ``tp`` (Korthikanti et al.,
arXiv:2205.05198). Entries whose names a model does not have are passed over.
"""

from __future__ import annotations

from autopar.spec import Spec

Plan = dict[str, Spec]

QKV = "(3 -1/tp)"  # query, key and value in one weight, each split by itself

KINDS: dict[str, dict[str, Spec]] = {  # of a linear layer: what its parameters are
    "column": {"weight": ("tp", None), "bias": ("tp",)},
    "row": {"weight": (None, "tp")},
    "fused": {"weight": (QKV, None), "bias": (QKV,)},
    "column, transposed": {"weight": (None, "tp"), "bias": ("tp",)},
    "row, transposed": {"weight": ("tp", None)},
    "fused, transposed": {"weight": (None, QKV), "bias": (QKV,)},
}

LAYERS: dict[str, str] = {  # kind → the layers' names, in the models that people train
    # Llama, Mistral, Qwen, Gemma, OPT; T5; BERT, ViT
    "column": "q_proj k_proj v_proj gate_proj up_proj fc1"
    " SelfAttention.q SelfAttention.k SelfAttention.v EncDecAttention.q EncDecAttention.k EncDecAttention.v"
    " DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1 query key value intermediate.dense linear1",
    "row": "o_proj out_proj down_proj fc2 SelfAttention.o EncDecAttention.o DenseReluDense.wo attention.output.dense"
    " layer.*.output.dense linear2",
    # GPT-2, whose weights are transposed
    "fused, transposed": "attn.c_attn",
    "column, transposed": "mlp.c_fc",
    "row, transposed": "attn.c_proj mlp.c_proj",
}

MEGATRON: Plan = {
    f"*.{layer}.{parameter}": spec
    for kind, layers in LAYERS.items()
    for layer in layers.split()
    for parameter, spec in KINDS[kind].items()
} | {"*.in_proj_weight": (QKV, None), "*.in_proj_bias": (QKV,)}  # torch.nn.MultiheadAttention

RESIDUAL = (  # modules that begin the residual stream, or return what is added to it
    "embed_tokens", "wte", "shared", "embeddings", "o_proj", "out_proj", "down_proj", "c_proj", "SelfAttention.o",
    "EncDecAttention.o", "DenseReluDense.wo", "attention.output.dense", "layer.*.output.dense",
)  # fmt: skip

SEQUENCE: Plan = {f"*.{module}()": ("?", "tp", None) for module in RESIDUAL}

PRESETS: dict[str, Plan] = {
    "ddp": {},  # parameters whole, and the batch split, as without a plan
    "megatron": MEGATRON,
    "megatron+sp": MEGATRON | SEQUENCE,
}
