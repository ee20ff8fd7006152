"""Define encoders with decoders of transformers: translation, summaries, speech to text."""

from __future__ import annotations

from zoo import CAUSAL, DEPTH, GROUPED, PAIR, ROWS, T5, VOCABULARY, Architecture, pair, real, tokens, unmasked

PAIRS = {
    "t5": pair("T5ForConditionalGeneration", T5),
    "t5 gated": pair("T5ForConditionalGeneration", T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": pair("MT5ForConditionalGeneration", T5),
    "umt5": pair("UMT5ForConditionalGeneration", T5),
    "longt5": pair("LongT5ForConditionalGeneration", T5, local_radius=3, global_block_size=2),
    "bart": pair("BartForConditionalGeneration"),
    "mbart": pair("MBartForConditionalGeneration"),
    "pegasus": pair("PegasusForConditionalGeneration"),
    "pegasus x": pair(
        "PegasusXForConditionalGeneration", block_size=4, num_global_tokens=2, stagger_local_blocks=False, block=(7, 7)
    ),
    "marian": pair("MarianMTModel"),
    "m2m": pair("M2M100ForConditionalGeneration"),
    "blenderbot": pair("BlenderbotForConditionalGeneration"),
    "blenderbot small": pair("BlenderbotSmallForConditionalGeneration"),
    "led": pair(
        "LEDForConditionalGeneration",
        attention_window=4,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    "plbart": pair("PLBartForConditionalGeneration"),
    "mvp": pair("MvpForConditionalGeneration"),
    "fsmt": Architecture(
        "FSMTForConditionalGeneration",
        PAIR | {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["a", "b"]},
        unmasked,
        ("input_ids", "labels"),
        (5, 5),
    ),
    "prophetnet": pair(
        "ProphetNetForConditionalGeneration",
        {
            "hidden_size": 16,
            "num_encoder_layers": DEPTH,
            "num_decoder_layers": DEPTH,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "ngram": 2,
            "num_buckets": 8,
            "relative_max_distance": 16,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
    ),
    "nllb moe": pair(
        "NllbMoeForConditionalGeneration",
        num_experts=4,
        expert_capacity=32,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
    ),
    "bigbird pegasus": pair("BigBirdPegasusForConditionalGeneration", attention_type="original_full"),
    "t5gemma": pair(
        "T5GemmaForConditionalGeneration",
        {
            "encoder": {k: v for k, v in GROUPED.items() if k != "use_cache"},
            "decoder": GROUPED,
            "vocab_size": VOCABULARY,
        },
    ),
    "moonshine": Architecture(
        "MoonshineForConditionalGeneration",
        CAUSAL
        | {
            "encoder_num_hidden_layers": DEPTH,
            "decoder_num_hidden_layers": DEPTH,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "decoder_start_token_id": 1,
        },
        lambda: {"input_values": real(ROWS, 4000), "labels": tokens()},
        (),
        (5, 5),
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        PAIR
        | {
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        lambda: {"input_features": real(ROWS, 8, 16), "labels": tokens()},
        (),
        (5, 5),
    ),
    "speech to text": Architecture(
        "Speech2TextForConditionalGeneration",
        PAIR
        | {
            "input_feat_per_channel": 8,
            "num_conv_layers": 1,
            "conv_kernel_sizes": (3,),
            "conv_channels": 16,
            "max_source_positions": 32,
            "max_target_positions": 16,
        },
        lambda: {"input_features": real(ROWS, 16, 8), "labels": tokens()},
        (),
        (5, 5),
    ),
}
