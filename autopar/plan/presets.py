"""Define plans by name as data, on which a plan may build: ``plan=["megatron", {"*.head.weight": ("tp", None)}]``.

``megatron`` splits each pair of matrix products over ``tp``: the first by columns, the second by rows (Shoeybi et al.,
arXiv:1909.08053). ``megatron+sp`` also splits the sequence between them over ``tp`` (Korthikanti et al.,
arXiv:2205.05198). ``fsdp`` also splits each parameter over the axis of the batch, as ZeRO 3 does: it is gathered where
it is used, and its gradient is reduced to its pieces. ``hsdp`` splits the batch over two axes, and the parameters over
the second alone (Zhao et al., arXiv:2304.11277): each piece has a copy for each rank of the first, over which its
gradient is added up. Entries whose names a model does not have are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.plan.batch import split_over
from autopar.plan.spec import Spec

Plan = dict[str, Spec]

QKV = "(3 -1/tp)"  # query, key and value in one weight, each split by itself
PAIR = "(2 -1/tp)"  # gate and up in one weight

KINDS: dict[str, dict[str, Spec]] = {  # kind of a layer → its parameters and their layouts
    "column": {"weight": ("tp", None), "bias": ("tp",)},
    "row": {"weight": (None, "tp")},
    "three columns": {"weight": (QKV, None), "bias": (QKV,)},
    "two columns": {"weight": (PAIR, None), "bias": (PAIR,)},
    "column, transposed": {"weight": (None, "tp"), "bias": ("tp",)},
    "row, transposed": {"weight": ("tp", None)},
    "three columns, transposed": {"weight": (None, QKV), "bias": (QKV,)},
    "experts": {"gate_up_proj": (None, PAIR, None), "up_proj": (None, "tp", None), "down_proj": (None, None, "tp")},
    "experts, transposed": {"gate_up_proj": (None, None, PAIR), "down_proj": (None, "tp", None)},
    "experts, interleaved": {
        "gate_up_proj": (None, None, "tp"),
        "gate_up_proj_bias": (None, "tp"),
        "down_proj": (None, "tp", None),
    },
    "heads": {"weight": (None, "tp")},  # a table with a column for each head
    "norm": {"weight": ("tp",), "bias": ("tp",)},  # of a split dim
    "depthwise": {"weight": ("tp", None, None, None), "bias": ("tp",)},
    "depthwise 1d": {"weight": ("tp", None, None), "bias": ("tp",)},
    "whole": {"weight": (), "bias": ()},
}

MAMBA = ("mixer:MambaMixer", "mixer:FalconMambaMixer", "mamba:JambaMambaMixer")

LAYERS: tuple[tuple[str, str, str], ...] = (  # models, kind, names of layers
    ("Llama, Mistral, Qwen, Gemma, OPT, Phi", "column", "q_proj k_proj v_proj gate_proj up_proj fc1"),
    ("Llama, Mistral, Qwen, Gemma, OPT, Phi", "row", "o_proj out_proj down_proj self_attn.dense fc2"),
    ("Phi-3", "three columns", "qkv_proj"),
    ("Phi-3", "two columns", "gate_up_proj"),
    ("GPT-Neo, GPT-BigCode, StarCoder", "column", "mlp.c_fc"),
    ("GPT-Neo, GPT-BigCode, StarCoder", "row", "attn.c_proj mlp.c_proj"),
    ("GPT-2", "three columns, transposed", "attn.c_attn:Conv1D"),
    ("GPT-2", "column, transposed", "mlp.c_fc:Conv1D"),
    ("GPT-2", "row, transposed", "attn.c_proj:Conv1D mlp.c_proj:Conv1D"),
    ("CodeGen: the parts in each of four groups", "column", "attn.qkv_proj"),
    ("GPT-J", "column", "fc_in"),
    ("GPT-J", "row", "fc_out"),
    ("GPT-NeoX, Falcon, Bloom: heads with a query, key and value each", "column", "query_key_value dense_h_to_4h"),
    ("GPT-NeoX, Falcon, Bloom", "row", "attention.dense self_attention.dense dense_4h_to_h"),
    ("BERT, ViT", "column", "query key value intermediate.dense"),
    ("BERT, ViT", "row", "output.dense"),
    ("DistilBERT", "column", "q_lin k_lin v_lin lin1"),
    ("DistilBERT", "row", "out_lin lin2"),
    (
        "T5",
        "column",
        "SelfAttention.q SelfAttention.k SelfAttention.v EncDecAttention.q EncDecAttention.k EncDecAttention.v",
    ),
    ("T5", "column", "DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1"),
    ("T5", "row", "SelfAttention.o EncDecAttention.o DenseReluDense.wo"),
    ("all: the vocabulary", "column", "embed_tokens wte word_embeddings shared embed_in"),
    ("all: the head", "column", "lm_head embed_out predictions.decoder"),
    ("torch.nn.TransformerEncoderLayer", "column", "linear1"),
    ("torch.nn.TransformerEncoderLayer", "row", "linear2"),
    ("Mixtral, Qwen-MoE, DeepSeek", "experts", "experts"),
    ("Aria, Llama 4", "experts, transposed", "experts:AriaExperts experts:Llama4TextExperts"),
    ("GPT-OSS: gate and up alternate", "experts, interleaved", "experts:GptOssExperts"),
    ("DeepSeek", "column", "q_b_proj kv_b_proj"),
    (
        "OLMo-2, OLMoE: norms over all heads",
        "norm",
        " ".join(f"{part}_norm:{kind}RMSNorm" for part in "qk" for kind in ("Olmo2", "Olmo3", "Olmoe", "FlexOlmo")),
    ),
    ("BitNet", "norm", "attn_sub_norm ffn_sub_norm"),
    ("ModernBERT, MPT", "three columns", "attn.Wqkv"),
    ("ModernBERT", "two columns", "mlp.Wi"),
    ("ModernBERT", "row", "attn.Wo mlp.Wo"),
    ("CTRL", "column", "multi_head_attention.Wq multi_head_attention.Wk multi_head_attention.Wv ffn.0"),
    ("CTRL", "row", "multi_head_attention.dense ffn.2"),
    ("MobileBERT", "whole", "bottleneck.attention.dense output.bottleneck.dense"),
    ("ALBERT", "column", "ffn"),
    ("ALBERT", "row", "ffn_output"),
    ("MPNet", "column", "attn.q attn.k attn.v"),
    ("MPNet", "row", "attn.o"),
    (
        "DeBERTa",
        "column",
        "self.in_proj pos_proj pos_q_proj query_proj key_proj value_proj pos_key_proj pos_query_proj",
    ),
    ("LiLT", "column", "layout_query layout_key layout_value layout_intermediate.dense"),
    ("LiLT", "row", "layout_output.dense"),
    ("Funnel", "column", "q_head k_head v_head ffn.linear_1"),
    ("Funnel", "row", "post_proj ffn.linear_2"),
    ("XLNet", "column", "ff.layer_1"),
    ("XLNet", "row", "ff.layer_2"),
    ("Perceiver, PVT", "column", "mlp.dense1"),
    ("Perceiver, PVT", "row", "mlp.dense2"),
    ("LongT5", "column", "LocalSelfAttention.q LocalSelfAttention.k LocalSelfAttention.v"),
    ("LongT5", "row", "LocalSelfAttention.o"),
    ("T5", "heads", "relative_attention_bias"),
    ("BLIP, SAM, Hiera, TimeSformer", "three columns", "self_attn.qkv attn.qkv attention.qkv"),
    ("BLIP, SAM, Hiera", "row", "self_attn.projection attn.proj"),
    ("SegFormer", "depthwise", "dwconv.dwconv"),
    ("wav2vec 2.0", "column", "intermediate_dense linear_q linear_k linear_v linear_pos"),
    ("wav2vec 2.0", "row", "output_dense linear_out"),
    ("PatchTST", "column", "ff.0"),
    ("PatchTST", "row", "ff.3"),
    ("Mamba", "two columns", " ".join(f"{kind}.in_proj" for kind in MAMBA)),
    ("Mamba", "depthwise 1d", " ".join(f"{kind}.conv1d" for kind in MAMBA)),
    ("Mamba", "column", " ".join(f"{kind}.dt_proj" for kind in MAMBA)),
    ("Mamba", "row", " ".join(f"{kind}.x_proj" for kind in MAMBA)),
    ("RWKV", "column", "feed_forward.key attention.key attention.value attention.receptance"),
    ("RWKV", "row", "feed_forward.value attention.output"),
)

OF_HEADS: Plan = {  # parameters with a dim for the heads
    "*.in_proj_weight": (QKV, None), "*.in_proj_bias": (QKV,),  # torch.nn.MultiheadAttention
    **{f"*.rel_attn.{name}": (None, "tp", None) for name in ("q", "k", "v", "o", "r", "seg_embed")},  # XLNet
    **{f"*.rel_attn.{name}": ("tp", None) for name in ("r_r_bias", "r_s_bias", "r_w_bias")},
    **{f"*.attention.{name}": (None, "tp", None) for name in ("r_kernel", "seg_embed")},  # Funnel
    **{f"*.attention.{name}": ("tp", None) for name in ("r_r_bias", "r_s_bias", "r_w_bias")},
    **{f"*.self.{name}": ("tp",) for name in ("q_bias", "v_bias")},  # DeBERTa
    **{f"*.self_attn.{name}": ("tp", None) for name in ("pos_bias_u", "pos_bias_v")},  # wav2vec 2.0
    **{f"*.attention.{name}": ("tp",) for name in ("time_decay", "time_first")},  # RWKV
    "*.self_attn.sinks": ("tp",),  # GPT-OSS
    **{f"*.{kind}.A_log": ("tp", None) for kind in MAMBA},
    **{f"*.{kind}.D": ("tp",) for kind in MAMBA},
    "*.relative_position_bias_table": (None, "tp"),  # Swin, BEiT
    "*.self.logit_scale": ("tp", None, None), "*.continuous_position_bias_mlp.2.weight": ("tp", None),  # Swin v2
}  # fmt: skip

MEGATRON: Plan = {
    f"*.{layer}.{parameter}": spec
    for _, kind, layers in LAYERS
    for layer in layers.split()
    for parameter, spec in KINDS[kind].items()
} | OF_HEADS

RESIDUAL = (  # modules that begin the residual stream, or return a value that is added to it
    "embed_tokens", "wte", "shared", "word_embeddings", "embed_in", "embeddings", "o_proj", "out_proj", "down_proj",
    "self_attn.dense", "c_proj", "fc_out", "attention.dense", "self_attention.dense", "dense_4h_to_h", "out_lin",
    "lin2", "attention.output.dense", "layer.*.output.dense", "SelfAttention.o", "EncDecAttention.o",
    "DenseReluDense.wo",
)  # fmt: skip

SEQUENCE: Plan = {f"*.{module}()": ("?", "tp", None) for module in RESIDUAL}


class Preset(NamedTuple):
    """A plan by name.

    Attributes:
        what: what it does, in a sentence.
        globs: the layouts that it gives by name.
        batch: over how many axes it splits the batch, in a search too; 0: over none in a search, over one without.
        of_shape: what becomes of the layout of each parameter: a function of the layout that it has without this, its
            shape, the mesh, and the last of the axes that split the batch.
    """

    what: str
    globs: Mapping[str, Spec] = MappingProxyType({})
    batch: int = 0
    of_shape: Callable[[DistAttr, Sequence[int], Mesh, str], DistAttr] | None = None


PRESETS: dict[str, Preset] = {
    "ddp": Preset("splits the batch only", batch=1),
    "fsdp": Preset("splits the batch, and each parameter over the same axis", batch=1, of_shape=split_over),
    "hsdp": Preset("splits the batch over two axes, and each parameter over the second", batch=2, of_shape=split_over),
    "megatron": Preset("splits pairs of matrix products over tp, by columns and then by rows", MEGATRON),
    "megatron+sp": Preset("megatron, and the sequence between the pairs is split over tp", MEGATRON | SEQUENCE),
    "fsdp+tp": Preset("megatron over tp, and fsdp over the axis of the batch", MEGATRON, 1, split_over),
}
