"""Define encoders of transformers: masked language models, and models that classify or find answers."""

from __future__ import annotations

import torch
from zoo import (
    DEPTH,
    GROUPED,
    LENGTH,
    ROWS,
    TEXT,
    VOCABULARY,
    Architecture,
    Batch,
    classes,
    encoder,
    text,
    unlabelled,
    unmasked,
)


def questions() -> Batch:
    """A batch of texts, and where in each the answer begins and ends."""
    return unlabelled() | {name: torch.randint(LENGTH, (ROWS,)) for name in ("start_positions", "end_positions")}


ENCODERS = {
    "bert": encoder("BertForMaskedLM"),
    "bert eager": encoder("BertForMaskedLM", attn_implementation="eager"),
    "roberta": encoder("RobertaForMaskedLM"),
    "xlm roberta": encoder("XLMRobertaForMaskedLM"),
    "camembert": encoder("CamembertForMaskedLM"),
    "roberta prelayernorm": encoder("RobertaPreLayerNormForMaskedLM"),
    "data2vec text": encoder("Data2VecTextForMaskedLM"),
    "albert": encoder("AlbertForMaskedLM", embedding_size=8),
    "electra": encoder("ElectraForMaskedLM", embedding_size=8),
    "distilbert": encoder(
        "DistilBertForMaskedLM",
        {
            "dim": 16,
            "hidden_dim": 24,
            "n_layers": DEPTH,
            "n_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
        },
    ),
    "deberta": encoder("DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deberta v2": encoder(
        "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4
    ),
    "modernbert": encoder("ModernBertForMaskedLM", local_attention=4),
    "mpnet": encoder("MPNetForMaskedLM"),
    "mobilebert": encoder(
        "MobileBertForMaskedLM", intra_bottleneck_size=8, embedding_size=8, true_hidden_size=8, block=(5, 6)
    ),
    "squeezebert": encoder(
        "SqueezeBertForMaskedLM",
        embedding_size=16,
        q_groups=2,
        k_groups=2,
        v_groups=2,
        intermediate_groups=2,
        output_groups=2,
    ),
    "megatron bert": encoder("MegatronBertForMaskedLM"),
    "rembert": encoder("RemBertForMaskedLM", input_embedding_size=8, output_embedding_size=8),
    "ernie": encoder("ErnieForMaskedLM"),
    "esm": encoder("EsmForMaskedLM", position_embedding_type="rotary", mask_token_id=3, token_dropout=False),
    "fnet": Architecture("FNetForMaskedLM", TEXT, unmasked, ("input_ids", "labels"), None),
    "funnel": encoder(
        "FunnelForMaskedLM",
        {
            "d_model": 16,
            "n_head": 4,
            "d_head": 4,
            "d_inner": 24,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "vocab_size": VOCABULARY,
        },
        None,
    ),
    "roformer": encoder("RoFormerForMaskedLM", embedding_size=16),
    "convbert": encoder("ConvBertForMaskedLM", embedding_size=16, head_ratio=2, conv_kernel_size=3, num_groups=1),
    "xlnet": encoder(
        "XLNetLMHeadModel",
        {
            "d_model": 16,
            "n_layer": DEPTH,
            "n_head": 4,
            "d_inner": 24,
            "vocab_size": VOCABULARY,
            "use_mems_train": False,
        },
    ),
    "xlm": encoder(
        "XLMWithLMHeadModel",
        {
            "emb_dim": 16,
            "n_layers": DEPTH,
            "n_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "pad_index": 0,
        },
    ),
    "flaubert": encoder(
        "FlaubertWithLMHeadModel",
        {
            "emb_dim": 16,
            "n_layers": DEPTH,
            "n_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "pad_index": 0,
        },
    ),
    "longformer": encoder("LongformerForMaskedLM", attention_window=4),
    "big bird": encoder("BigBirdForMaskedLM", block_size=2, num_random_blocks=1),
    "big bird full": encoder("BigBirdForMaskedLM", attention_type="original_full"),
    "reformer": encoder(
        "ReformerForMaskedLM",
        TEXT | {"is_decoder": False},
        None,
        attention_head_size=4,
        axial_pos_embds=False,
        attn_layers=["local"],
        local_attn_chunk_length=4,
        feed_forward_size=24,
    ),
    "perceiver": Architecture(
        "PerceiverForMaskedLM",
        {
            "d_model": 16,
            "num_latents": 4,
            "d_latents": 16,
            "num_blocks": 1,
            "num_self_attends_per_block": DEPTH,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "qk_channels": 16,
            "v_channels": 16,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": LENGTH,
        },
        text,
        (),
    ),
    "canine": Architecture(
        "CanineForSequenceClassification",
        TEXT
        | {
            "num_hash_buckets": 16,
            "num_hash_functions": 2,
            "downsampling_rate": 2,
            "local_transformer_stride": 4,
            "num_labels": 3,
        },
        classes,
        (),
    ),
    "layoutlm": encoder("LayoutLMForMaskedLM"),
    "lilt": Architecture(
        "LiltForSequenceClassification",
        TEXT | {"hidden_size": 24, "channel_shrink_ratio": 2, "num_labels": 3},
        classes,
        (),
        block=(4, 4),
    ),
    "ibert": encoder("IBertForMaskedLM"),
    "mra": encoder("MraForMaskedLM"),
    "yoso": encoder("YosoForMaskedLM", use_expectation=True),
    "nomic bert": encoder("NomicBertForMaskedLM"),
    "eurobert": encoder("EuroBertForMaskedLM"),
    "splinter": Architecture("SplinterForQuestionAnswering", TEXT, questions, ()),
    "bert classes": Architecture("BertForSequenceClassification", TEXT | {"num_labels": 3}, classes, ()),
    "bert questions": Architecture("BertForQuestionAnswering", TEXT, questions, ()),
    "llama classes": Architecture("LlamaForSequenceClassification", GROUPED | {"num_labels": 3}, classes, ()),
}
