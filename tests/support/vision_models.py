"""Models of images and videos of transformers: attention, convolutions, both."""

from __future__ import annotations

import torch
from zoo import DEPTH, GPT, ROWS, SIDE, VISION, Architecture, pixels, tokens, video, vision

VISIONS = {
    "vit": vision("ViTForImageClassification"),
    "vit eager": vision("ViTForImageClassification", attn_implementation="eager"),
    "deit": vision("DeiTForImageClassification"),
    "beit": vision("BeitForImageClassification", use_relative_position_bias=True, use_mask_token=False),
    "dinov2": vision("Dinov2ForImageClassification", mlp_ratio=2),
    "dinov2 registers": vision("Dinov2WithRegistersForImageClassification", mlp_ratio=2, num_register_tokens=2),
    "dinov3": Architecture("DINOv3ViTModel", VISION | {"num_register_tokens": 2, "pos_embed_rescale": None}, pixels),
    "ijepa": vision("IJepaForImageClassification"),
    "vit msn": vision("ViTMSNForImageClassification"),
    "vit mae": Architecture(
        "ViTMAEForPreTraining",
        VISION
        | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 24},
        lambda: {**pixels(), "noise": torch.rand(ROWS, 16, dtype=torch.float64)},
    ),
    "siglip vision": vision("SiglipForImageClassification", {"vision_config": VISION, "num_labels": 3}),
    "yolos": Architecture("YolosModel", VISION | {"image_size": [SIDE, SIDE], "num_detection_tokens": 2}, pixels),
    "vivit": Architecture("VivitForVideoClassification", VISION | {"num_frames": 4, "tubelet_size": [2, 4, 4]}, video),
    "videomae": Architecture("VideoMAEForVideoClassification", VISION | {"num_frames": 4, "tubelet_size": 2}, video),
    "timesformer": Architecture("TimesformerForVideoClassification", VISION | {"num_frames": 4}, video, (), (3, 3)),
    "swin": vision(
        "SwinForImageClassification",
        {
            "image_size": SIDE,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [DEPTH, DEPTH],
            "num_heads": [2, 4],
            "window_size": 2,
            "num_labels": 3,
        },
        (4, 4),
    ),
    "swin v2": vision(
        "Swinv2ForImageClassification",
        {
            "image_size": SIDE,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [DEPTH, DEPTH],
            "num_heads": [2, 4],
            "window_size": 2,
            "num_labels": 3,
        },
        (4, 4),
    ),
    "convnext": vision(
        "ConvNextForImageClassification",
        {"depths": [DEPTH, DEPTH], "hidden_sizes": [8, 16], "num_stages": 2, "patch_size": 2, "num_labels": 3},
        None,
    ),
    "convnext v2": vision(
        "ConvNextV2ForImageClassification",
        {"depths": [DEPTH, DEPTH], "hidden_sizes": [8, 16], "num_stages": 2, "patch_size": 2, "num_labels": 3},
        None,
    ),
    "resnet": vision(
        "ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [DEPTH, DEPTH], "num_labels": 3}, None
    ),
    "resnet basic": vision(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [DEPTH, DEPTH], "layer_type": "basic", "num_labels": 3},
        None,
    ),
    "regnet": vision(
        "RegNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [DEPTH, DEPTH], "groups_width": 4, "num_labels": 3},
        None,
    ),
    "mobilenet v1": vision(
        "MobileNetV1ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 4, "num_labels": 3}, None
    ),
    "mobilenet v2": vision(
        "MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 4, "num_labels": 3}, None
    ),
    "efficientnet": vision(
        "EfficientNetForImageClassification",
        {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320, "num_labels": 3},
        None,
    ),
    "mobilevit": vision(
        "MobileViTForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [8, 12, 16],
            "neck_hidden_sizes": [4, 4, 4, 4, 4, 4, 8],
            "num_attention_heads": 4,
            "num_labels": 3,
        },
        None,
    ),
    "segformer": Architecture(
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [DEPTH, DEPTH],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8,
            "num_labels": 3,
        },
        lambda: {**pixels(), "labels": torch.randint(3, (ROWS, SIDE, SIDE))},
        (),
        (4, 4),
    ),
    "poolformer": vision(
        "PoolFormerForImageClassification",
        {
            "depths": [DEPTH, DEPTH],
            "hidden_sizes": [8, 16],
            "num_encoder_blocks": 2,
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
            "mlp_ratio": 2.0,
            "num_labels": 3,
        },
        None,
    ),
    "pvt": vision(
        "PvtForImageClassification",
        {"image_size": 32, "depths": [DEPTH] * 4, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 2, 2, 4], "num_labels": 3},
        None,
    ),
    "levit": vision(
        "LevitForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [8, 16, 16],
            "num_attention_heads": [2, 4, 4],
            "depths": [DEPTH] * 3,
            "key_dim": [4, 4, 4],
            "num_labels": 3,
        },
        None,
    ),
    "focalnet": vision(
        "FocalNetForImageClassification",
        {
            "image_size": SIDE,
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [DEPTH, DEPTH],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            "num_labels": 3,
        },
        None,
    ),
    "bit": vision(
        "BitForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [DEPTH, DEPTH], "num_groups": 4, "num_labels": 3},
        None,
    ),
    "cvt": vision(
        "CvtForImageClassification",
        {
            "patch_sizes": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "embed_dim": [8, 16],
            "num_heads": [1, 2],
            "depth": [DEPTH + 1, DEPTH + 1],
            "mlp_ratio": [2.0, 2.0],
            "attention_drop_rate": [0.0, 0.0],
            "drop_rate": [0.0, 0.0],
            "drop_path_rate": [0.0, 0.0],
            "qkv_bias": [True, True],
            "cls_token": [False, True],
            "qkv_projection_method": ["dw_bn", "dw_bn"],
            "kernel_qkv": [3, 3],
            "padding_kv": [1, 1],
            "stride_kv": [2, 2],
            "padding_q": [1, 1],
            "stride_q": [1, 1],
            "num_labels": 3,
        },
        None,
    ),
    "swiftformer": vision(
        "SwiftFormerForImageClassification", {"image_size": 32, "depths": [DEPTH] * 4, "embed_dims": [8, 8, 16, 16], "num_labels": 3}, None
    ),
    "hiera": vision(
        "HieraForImageClassification",
        {
            "image_size": [SIDE, SIDE],
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "embed_dim": 8,
            "depths": [DEPTH, DEPTH],
            "num_heads": [2, 4],
            "query_stride": [2, 2],
            "num_query_pool": 1,
            "masked_unit_size": [2, 2],
            "masked_unit_attention": [True, False],
            "mlp_ratio": 2.0,
            "num_labels": 3,
        },
        (4, 4),
    ),
    "imagegpt": Architecture(
        "ImageGPTForCausalImageModeling",
        {k: v for k, v in GPT.items() if k not in ("pad_token_id", "bos_token_id", "eos_token_id")},
        lambda: {"input_ids": tokens().clamp_max(22), "labels": tokens().clamp_max(22)},
        ("input_ids", "labels"),
    ),
    "dpt": Architecture(
        "DPTForDepthEstimation",
        VISION
        | {
            "num_hidden_layers": DEPTH + 3,
            "backbone_out_indices": [0, 1, 2, DEPTH + 2],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "reassemble_factors": [4, 2, 1, 0.5],
            "is_hybrid": False,
        },
        pixels,
    ),
    "sam vision": Architecture(
        "SamVisionModel",
        VISION | {"output_channels": 8, "window_size": 2, "global_attn_indexes": [], "num_pos_feats": 4},
        pixels,
        block=(2, 4),
    ),
    "mgp": Architecture(
        "MgpstrForSceneTextRecognition",
        {
            "image_size": [SIDE, SIDE],
            "patch_size": 4,
            "hidden_size": 16,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": 4,
            "mlp_ratio": 2.0,
            "num_character_labels": 5,
            "num_bpe_labels": 5,
            "num_wordpiece_labels": 5,
            "max_token_length": 4,
        },
        pixels,
    ),
}
