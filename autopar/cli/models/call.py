"""Make the arguments of a call for a model of Hugging Face, and add labels, without which it returns no loss."""

from __future__ import annotations

from typing import Any

import torch

from autopar.cli.models.inputs import drawn
from autopar.cli.models.own import takes
from autopar.cli.train.refused import Refused

IDS, PIXELS, LABELS = "input_ids", "pixel_values", "labels"
ONE_LABEL = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")  # for each row of the batch


def call_of(model: torch.nn.Module, batch: int, sequence: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the first argument of a model of Hugging Face: ids of tokens, or pixels.

    Raises:
        Refused: the model takes something else, or a shorter sequence.
    """
    config: Any = model.config
    text, first = config.get_text_config(), getattr(model, "main_input_name", IDS)
    most = getattr(text, "max_position_embeddings", None)
    if first == IDS:
        if isinstance(most, int) and 0 < most < sequence:
            raise Refused(
                f"--sequence {sequence} is longer than the {most} positions of {type(model).__name__}; use a shorter "
                f"one, or --set max_position_embeddings={sequence}"
            )
        ids = drawn([batch, sequence], torch.int64, device, text.vocab_size)
        more = {"decoder_input_ids": ids.clone()} if config.is_encoder_decoder and LABELS not in takes(model) else {}
        return {IDS: ids, **more}
    size = getattr(config, "image_size", None)
    if first == PIXELS and isinstance(size, (int, list, tuple)):
        height, width = (size, size) if isinstance(size, int) else size
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        return {PIXELS: drawn([batch, getattr(config, "num_channels", 3), height, width], dtype, device)}
    raise Refused(
        f"{type(model).__name__} takes {first}, whose shape its configuration does not say; give it, as in "
        f"--inputs {first}=f32[{batch},…]"
    )


def with_labels(model: torch.nn.Module, example: Any) -> tuple[Any, tuple[str, ...]]:
    """Add labels to the keywords of a call, if the model takes them and there are none. Returns a remark about it."""
    if not isinstance(example, dict) or LABELS in example or LABELS not in takes(model):
        return example, ()
    kind = type(model).__name__
    first = next((value for value in example.values() if isinstance(value, torch.Tensor)), None)
    if first is None or first.dim() == 0:
        return example, ()
    config = getattr(model, "config", None)
    if kind.endswith(ONE_LABEL):
        shape, below = [first.shape[0]], getattr(config, "num_labels", 2)
    elif isinstance(example.get(IDS), torch.Tensor):
        own = "num_labels" if kind.endswith("ForTokenClassification") else "vocab_size"
        shape, below = list(example[IDS].shape), getattr(config, own, 2)
    else:
        return example, (f"{kind} takes labels, and none are given: what is planned may have no loss",)
    labels = drawn(shape, torch.int64, first.device, below)
    return {**example, LABELS: labels}, (f"labels=i64{shape} are added, for the loss",)
