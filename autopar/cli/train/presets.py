"""Define presets of whole trainings as a table: the options that differ from the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One row. ``what`` is for people; ``options`` are fields of ``Options``."""

    what: str
    options: Mapping[str, Any]


TRAININGS: dict[str, Preset] = {
    "llama-fp16-o2": Preset(
        "the configuration of PaddlePaddle's pull request 60022",
        {
            "mesh": "dp=2,tp=2", "amp": "fp16-O2", "loss_scale": 1024.0, "recompute": "blocks", "batch": 32,
            "microbatches": 16, "zero": 1, "clip_norm": 1.0, "optimizer": "adamw", "weight_decay": 0.01, "warmup": 5,
        },
    ),
    "llama-bf16-zero3": Preset(
        "all of a training's state split over the data axis, in bfloat16",
        {"mesh": "dp=4", "amp": "bf16-O1", "recompute": "blocks", "batch": 8, "microbatches": 2, "zero": 3,
         "clip_norm": 1.0, "warmup": 5},
    ),
    "llama-pp2-tp2": Preset(
        "two stages of a pipeline with tensor parallelism: fp16-O2, recomputation, 16 micro-batches",
        {
            "mesh": "pp=2,tp=2", "schedule": "1f1b", "amp": "fp16-O2", "loss_scale": 1024.0, "recompute": "blocks",
            "batch": 32, "microbatches": 16, "clip_norm": 1.0, "optimizer": "adamw", "weight_decay": 0.01, "warmup": 5,
        },
    ),
    "llama-pp2-dp2": Preset(
        "two stages with data parallelism, whose optimizer state is split over it",
        {
            "mesh": "pp=2,dp=2", "schedule": "1f1b", "amp": "fp16-O2", "loss_scale": 1024.0, "recompute": "blocks",
            "batch": 32, "microbatches": 16, "zero": 1, "clip_norm": 1.0, "optimizer": "adamw", "weight_decay": 0.01,
            "warmup": 5,
        },
    ),
}  # fmt: skip
