"""A zoo of models as their libraries have them, with random weights: name → how to make it, and a batch with labels.

Each is small, and in training mode. Dropout is off unless it is asked for: ``ARCHITECTURES["bert"].make(dropout=0.1)``.
"""

from __future__ import annotations

import torch
from decoder_models import DECODERS
from encoder_decoder_models import PAIRS
from encoder_models import ENCODERS
from mixture_models import MIXTURES
from state_space_models import STATE_SPACES
from vision_models import VISIONS
from zoo import (
    AUDIO,
    CAUSAL,
    DEPTH,
    ENCODER_DECODER,
    GROUPED,
    LENGTH,
    PAIR,
    ROWS,
    SIDE,
    TEXT,
    TOKENS,
    VISION,
    VISION_INSIDE,
    VOCABULARY,
    Architecture,
    audio,
    decoder,
    forecast,
    pixels,
    real,
    text,
    tokens,
    towers,
    unlabelled,
    with_image_tokens,
)

AUDIOS = {
    "wav2vec2": audio("Wav2Vec2ForSequenceClassification"),
    "wav2vec2 ctc": Architecture(
        "Wav2Vec2ForCTC",
        AUDIO | {"ctc_loss_reduction": "mean"},
        lambda: {"input_values": real(ROWS, 64), "labels": torch.randint(1, VOCABULARY, (ROWS, 3))},
    ),
    "hubert": audio("HubertForSequenceClassification"),
    "wavlm": audio("WavLMForSequenceClassification", num_buckets=8, max_bucket_distance=16),
    "unispeech": audio("UniSpeechForSequenceClassification"),
    "sew": audio("SEWForSequenceClassification", squeeze_factor=1),
    "data2vec audio": audio("Data2VecAudioForSequenceClassification"),
    "wav2vec2 conformer": audio(
        "Wav2Vec2ConformerForSequenceClassification", conv_depthwise_kernel_size=3, block=(3, 3)
    ),
    "wav2vec2 bert": Architecture(
        "Wav2Vec2BertForSequenceClassification",
        AUDIO
        | {"feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3, "position_embeddings_type": "relative"},
        lambda: {"input_features": real(ROWS, 16, 8), "labels": torch.randint(3, (ROWS,))},
        block=(3, 3),
    ),
    "ast": Architecture(
        "ASTForAudioClassification",
        VISION | {"num_mel_bins": 8, "max_length": 16, "frequency_stride": 4, "time_stride": 4},
        lambda: {"input_values": real(ROWS, 16, 8), "labels": torch.randint(3, (ROWS,))},
    ),
    "encodec": Architecture(
        "EncodecModel",
        {"num_filters": 4, "hidden_size": 8, "codebook_size": 8, "num_lstm_layers": 1},
        lambda: {"input_values": real(ROWS, 1, 640)},
        (),
        None,
    ),
}

MULTIMODAL = {
    "clip": towers("CLIPModel"),
    "siglip": towers("SiglipModel"),
    "chinese clip": towers("ChineseCLIPModel"),
    "blip": Architecture(
        "BlipForConditionalGeneration",
        {
            "text_config": {**TEXT, "encoder_hidden_size": 16, "use_cache": False},
            "vision_config": VISION_INSIDE,
            "image_text_hidden_size": 8,
        },
        lambda: {**text(), **pixels()},
        (),
        (5, 5),
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **GROUPED},
            "vision_config": {"model_type": "clip_vision_model", **VISION_INSIDE, "projection_dim": 8},
            "image_token_index": 23,
            "image_token_id": 23,
            "vision_feature_layer": -1,
            "image_seq_length": 16,
        },
        with_image_tokens,
        (),
        (4, 4),
    ),
    "git": Architecture(
        "GitForCausalLM", {**CAUSAL, "vision_config": VISION_INSIDE}, lambda: {**text(), **pixels()}, (), (4, 4)
    ),
    "vilt": Architecture(
        "ViltForQuestionAnswering",
        TEXT | {"image_size": SIDE, "patch_size": 4, "max_image_length": -1, "num_labels": 3},
        lambda: {**unlabelled(), **pixels(), "labels": torch.rand(ROWS, 3, dtype=torch.float64)},
    ),
    "paligemma": Architecture(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {"model_type": "gemma", **GROUPED},
            "vision_config": {"model_type": "siglip_vision_model", **VISION_INSIDE},
            "image_token_index": 23,
            "projection_dim": 16,
        },
        lambda: {**with_image_tokens(), "token_type_ids": torch.ones(ROWS, 24, dtype=torch.long)},
        (),
        (4, 4),
    ),
    "idefics3": Architecture(
        "Idefics3ForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **GROUPED},
            "vision_config": VISION_INSIDE,
            "image_token_id": 23,
            "scale_factor": 2,
        },
        lambda: {**with_image_tokens(4), "pixel_values": real(ROWS, 1, 3, SIDE, SIDE)},
        (),
        (4, 4),
    ),
    "visual bert": Architecture(
        "VisualBertForQuestionAnswering",
        TEXT | {"visual_embedding_dim": 8, "num_labels": 3},
        lambda: {
            **unlabelled(),
            "visual_embeds": real(ROWS, 4, 8),
            "visual_attention_mask": torch.ones(ROWS, 4),
            "labels": torch.rand(ROWS, 3, dtype=torch.float64),
        },
    ),
    "lxmert": Architecture(
        "LxmertModel",
        TEXT | {"l_layers": DEPTH, "x_layers": DEPTH, "r_layers": DEPTH, "visual_feat_dim": 8},
        lambda: {
            **unlabelled(),
            "visual_feats": real(ROWS, 4, 8),
            "visual_pos": torch.rand(ROWS, 4, 4, dtype=torch.float64),
        },
        (),
        None,
    ),
    "trocr": decoder("TrOCRForCausalLM", {**PAIR, "cross_attention_hidden_size": 16}),
    "kosmos2 text": Architecture(
        "Kosmos2Model",
        {
            "text_config": {
                "embed_dim": 16,
                "layers": DEPTH,
                "ffn_dim": 24,
                "attention_heads": 4,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 64,
            },
            "vision_config": VISION_INSIDE,
            "latent_query_num": 4,
        },
        lambda: {
            "pixel_values": pixels()["pixel_values"],
            "input_ids": tokens(),
            "image_embeds_position_mask": torch.tensor([[1] * 4 + [0] * (LENGTH - 4)] * ROWS),
        },
        (),
        (4, 4),
    ),
    "qwen2 vl text": Architecture(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {
                **GROUPED,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4},
            },
            "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 4},
        },
        text,
        TOKENS,
    ),
}

FORECASTER = ENCODER_DECODER | {
    "prediction_length": 4,
    "context_length": 4,
    "lags_sequence": [1, 2],
    "num_time_features": 2,
    "num_parallel_samples": 2,
}
SERIES = {
    "time series": Architecture("TimeSeriesTransformerForPrediction", FORECASTER, forecast, (), (5, 5)),
    "patchtst": Architecture(
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": 4,
            "ffn_dim": 24,
            "prediction_length": 4,
            "loss": "mse",
        },
        lambda: {"past_values": real(ROWS, 16, 2), "future_values": real(ROWS, 4, 2)},
    ),
    "patchtsmixer": Architecture(
        "PatchTSMixerForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_layers": DEPTH,
            "prediction_length": 4,
        },
        lambda: {"past_values": real(ROWS, 16, 2), "future_values": real(ROWS, 4, 2)},
        (),
        None,
    ),
    "informer": Architecture("InformerForPrediction", FORECASTER, forecast, (), (5, 5)),
    "autoformer": Architecture(
        "AutoformerForPrediction", FORECASTER | {"label_length": 2, "moving_average": 3}, forecast, (), (5, 5)
    ),
    "decision transformer": Architecture(
        "DecisionTransformerModel",
        {
            "state_dim": 3,
            "act_dim": 2,
            "hidden_size": 16,
            "max_ep_len": 16,
            "n_layer": DEPTH,
            "n_head": 4,
            "n_positions": 32,
        },
        lambda: {
            "states": real(ROWS, 4, 3),
            "actions": real(ROWS, 4, 2),
            "rewards": real(ROWS, 4, 1),
            "returns_to_go": real(ROWS, 4, 1),
            "timesteps": torch.arange(4).expand(ROWS, 4).clone(),
            "attention_mask": torch.ones(ROWS, 4),
        },
        (),
        (2, 2),
    ),
}

PLAIN = {
    "nn.Transformer": Architecture(
        "Translator", {"layers": DEPTH}, lambda: {"source": text()["input_ids"], "target": tokens()}, (), (5, 5)
    ),
    "lstm": Architecture("Recurrent", {"kind": "LSTM", "layers": DEPTH}, lambda: {"ids": tokens()}, (), None),
    "lstm both ways": Architecture(
        "Recurrent", {"kind": "LSTM", "layers": DEPTH, "both": True}, lambda: {"ids": tokens()}, (), None
    ),
    "gru": Architecture("Recurrent", {"kind": "GRU", "layers": DEPTH}, lambda: {"ids": tokens()}, (), None),
    "unet": Architecture(
        "UNet", {}, lambda: {"image": real(ROWS, 3, 8, 8), "labels": torch.randint(3, (ROWS, 8, 8))}, (), None
    ),
    "denoiser": Architecture(
        "Denoiser",
        {},
        lambda: {"noisy": real(ROWS, 3, 4, 4), "step": torch.randint(100, (ROWS,)), "noise": real(ROWS, 3, 4, 4)},
        (),
        None,
    ),
    "dcgan": Architecture("Generative", {}, lambda: {"latent": real(ROWS, 6), "real": real(ROWS, 3, 8, 8)}, (), None),
    "mlp mixer": Architecture(
        "Mixer",
        {"layers": DEPTH},
        lambda: {"image": real(ROWS, 3, SIDE, SIDE), "labels": torch.randint(3, (ROWS,))},
        (),
        None,
    ),
    "dlrm": Architecture(
        "Clicks",
        {},
        lambda: {
            "dense": real(ROWS, 5),
            "categories": torch.randint(10, (ROWS, 3, 2)),
            "clicked": torch.rand(ROWS, dtype=torch.float64),
        },
        (),
        None,
    ),
    "gcn": Architecture(
        "GraphConvolution",
        {},
        lambda: {"nodes": real(12, 5), "edges": torch.randint(12, (2, 30)), "labels": torch.randint(3, (12,))},
        (),
        None,
    ),
    "vae": Architecture("Autoencoder", {}, lambda: {"x": real(ROWS, 12), "noise": real(ROWS, 4)}, (), None),
}

ARCHITECTURES = PLAIN | DECODERS | MIXTURES | STATE_SPACES | ENCODERS | PAIRS | VISIONS | AUDIOS | MULTIMODAL | SERIES
