"""What the architectures of the zoo are made of: a class and a configuration, batches with labels, sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import plain_models
import torch
import transformers
from torch import nn

ROWS, LENGTH, VOCABULARY, SIDE = 8, 8, 24, 16


@dataclass(frozen=True)
class Depth:
    """In a configuration: the number of layers, and so many more."""

    more: int = 0

    def __add__(self, more: int) -> Depth:
        return Depth(self.more + more)


DEPTH = Depth()

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """One model of the zoo.

    Attributes:
        model: the class, of transformers or of ``plain_models``.
        config: arguments of its configuration, ``DEPTH`` where it has the number of layers.
        batch: makes the arguments of one call.
        sequence: the inputs whose dim 1 is a sequence, which context parallelism splits.
        block: the all-reduces over tp, forward and backward, that an expert of Megatron has in one layer; ``None``
            where nobody splits such a layer over tp.
    """

    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[], Batch] = dict
    sequence: tuple[str, ...] = ()
    block: tuple[int, int] | None = (2, 2)

    def make(self, layers: int = 1, dropout: float = 0.0) -> nn.Module:
        """The model in float64 and training mode."""
        torch.manual_seed(0)
        if hasattr(plain_models, self.model):
            model = getattr(plain_models, self.model)(**_deep(self.config, layers))
        else:
            kind = getattr(transformers, self.model)
            config = kind.config_class(**_deep(self.config, layers))
            set_dropout(config, dropout)
            model = kind(config)
            if hasattr(config.get_text_config(), "num_experts_per_tok"):
                model.set_experts_implementation("batched_mm")  # grouped_mm has no fake kernel in float32 and float64
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = dropout
            elif isinstance(getattr(module, "dropout", None), float):  # as of nn.MultiheadAttention
                module.dropout = dropout
        return model.double().train()


def _deep(value: Any, layers: int) -> Any:
    """A configuration with the number of layers filled in, at any depth."""
    if isinstance(value, Mapping):
        return {key: _deep(part, layers) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_deep(part, layers) for part in value)
    return layers + value.more if isinstance(value, Depth) else value


DROPPED = ("dropout", "pdrop", "drop_path", "drop_rate", "layerdrop", "jitter_noise")


def set_dropout(config: Any, probability: float) -> None:
    """Every probability of a configuration, and of those inside; whole layers are never dropped."""
    for one in _configs(config):
        for name, value in list(vars(one).items()):
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and any(word in name for word in DROPPED)
            ):
                vars(one)[name] = 0.0 if "layerdrop" in name else probability  # past the check of types: some say int


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if isinstance(value, transformers.PretrainedConfig):
            yield from _configs(value)


def tokens(rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length))


def real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def text(**more: Callable[[], torch.Tensor]) -> Batch:
    """Tokens with labels, the last of one row padding."""
    ids, mask = tokens(), torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    ids = ids.where(mask.bool(), 0)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.where(mask.bool(), -100),
        **{k: make() for k, make in more.items()},
    }


def unlabelled() -> Batch:
    return {name: value for name, value in text().items() if name != "labels"}


def unmasked() -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def translated() -> Batch:
    """A source and a target."""
    labels = tokens()
    labels[0, -2:] = -100
    given = text()
    return {**given, "labels": labels}


def pixels(side: int = SIDE) -> Batch:
    return {"pixel_values": real(ROWS, 3, side, side)}


def video() -> Batch:
    return {"pixel_values": real(ROWS, 4, 3, SIDE, SIDE), "labels": torch.randint(3, (ROWS,))}


def forecast() -> Batch:
    """A series so far, and what comes."""
    past = {
        "past_values": real(ROWS, 6),
        "past_time_features": real(ROWS, 6, 2),
        "past_observed_mask": torch.ones(ROWS, 6),
    }
    return {**past, "future_values": real(ROWS, 4), "future_time_features": real(ROWS, 4, 2)}


def image(side: int = SIDE) -> Batch:
    return {**pixels(side), "labels": torch.randint(3, (ROWS,))}


def classes() -> Batch:
    given = text()
    return {**given, "labels": torch.randint(3, (ROWS,))}


TEXT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAUSAL = TEXT | {"use_cache": False}
GROUPED = CAUSAL | {"num_key_value_heads": 2, "head_dim": 4}
EXPERTS = GROUPED | {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "output_router_logits": False,
}
GPT = {
    "n_embd": 16,
    "n_layer": DEPTH,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 4,
    "num_channels": 3,
    "num_labels": 3,
}
ENCODER_DECODER = {
    "d_model": 16,
    "encoder_layers": DEPTH,
    "decoder_layers": DEPTH,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
PAIR = ENCODER_DECODER | {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": DEPTH,
    "num_decoder_layers": DEPTH,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": VOCABULARY,
    "num_labels": 3,
    "pad_token_id": 0,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "classifier_proj_size": 8,
    "apply_spec_augment": False,
}
TOKENS = ("input_ids", "attention_mask", "labels")


def decoder(
    model: str, config: Mapping[str, Any] = GROUPED, block: tuple[int, int] | None = (2, 2), **more: Any
) -> Architecture:
    return Architecture(model, {**config, **more}, text, TOKENS, block)


def encoder(
    model: str, config: Mapping[str, Any] = TEXT, block: tuple[int, int] | None = (2, 2), **more: Any
) -> Architecture:
    return Architecture(model, {**config, **more}, text, TOKENS, block)


def pair(
    model: str, config: Mapping[str, Any] = PAIR, block: tuple[int, int] | None = (5, 5), **more: Any
) -> Architecture:
    return Architecture(model, {**config, **more}, translated, TOKENS, block)


def side(config: Mapping[str, Any]) -> int:
    size = config.get("image_size", SIDE)
    return size[0] if isinstance(size, list) else size


def vision(
    model: str, config: Mapping[str, Any] = VISION, block: tuple[int, int] | None = (2, 2), **more: Any
) -> Architecture:
    return Architecture(model, {**config, **more}, functools.partial(image, side(config)), (), block)


def sound(rows: int = ROWS) -> Batch:
    return {"input_values": real(rows, 64), "labels": torch.randint(3, (rows,))}


def audio(
    model: str, config: Mapping[str, Any] = AUDIO, block: tuple[int, int] | None = (2, 2), **more: Any
) -> Architecture:
    return Architecture(model, {**config, **more}, sound, (), block)


VISION_INSIDE = {key: value for key, value in VISION.items() if key != "num_labels"}


def captioned() -> Batch:
    return {**unlabelled(), **pixels(), "return_loss": True}


def with_image_tokens(count: int = 16) -> Batch:
    """An image in place of the first tokens."""
    given = text()
    ids = torch.cat([torch.full((ROWS, count), 23), given["input_ids"].clamp_max(22)], dim=1)
    labels = torch.cat([torch.full((ROWS, count), -100), given["labels"].clamp_max(22)], dim=1)
    return {"input_ids": ids, "labels": labels, **pixels()}


def towers(model: str, **more: Any) -> Architecture:
    return Architecture(
        model,
        {
            "text_config": {**TEXT, "projection_dim": 8},
            "vision_config": {**VISION_INSIDE, "projection_dim": 8},
            "projection_dim": 8,
            **more,
        },
        captioned,
        (),
        (4, 4),
    )
