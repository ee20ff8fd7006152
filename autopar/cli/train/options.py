"""Define the options of ``autopar train``, as on the command line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.cli.output import OutputOptions
from autopar.cli.train.presets import TRAININGS

SCHEDULE = "1f1b"  # of a mesh with pp
NONE = "none"  # switches an option off that a preset may set


@dataclass(frozen=True)
class Tolerance:
    """The largest accepted relative differences of losses and of norms of gradients.

    Norms are noisier in low precision.

    Attributes:
        growth: by which factor they may grow in 100 steps, from the first on: differences of rounding do.
    """

    loss: float
    norm: float
    growth: float = 4.0  # measured in float32: norms differ by 9e-5 after 200 steps, and by 1.4e-3 after 388


DTYPES: dict[str, tuple[torch.dtype, Tolerance]] = {
    "float32": (torch.float32, Tolerance(1e-4, 1e-4)),
    "float64": (torch.float64, Tolerance(1e-4, 1e-4)),  # Llama computes its norms and its loss in float32 anyway
    "bfloat16": (torch.bfloat16, Tolerance(1e-2, 1e-2)),
}
AMPS: dict[str, Tolerance | None] = {  # ``None``: the tolerance of the dtype
    NONE: None,
    "bf16-O1": Tolerance(1e-2, 1e-1),
    "fp16-O1": Tolerance(2e-3, 5e-2),
    "bf16-O2": Tolerance(1e-2, 2e-1),
    "fp16-O2": Tolerance(2e-3, 5e-2),
}
RECOMPUTED = (NONE, "blocks", "min-cut")  # globs are accepted too
DEVICES = ("cpu", "cuda")
LOSS_SCALE = 1024.0  # for fp16; with torch's 65536 a first step may overflow on only one of mesh and single device


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OutputOptions):
    """The options of ``autopar train`` and their defaults; ``check`` replaces ``None``."""

    preset: str | None = None
    mesh: str = "dp=2,tp=2"
    plan: str | None = None
    simulate: bool = False
    device: str | None = None
    timeout: float = 60.0
    cache: str | None = None
    port: int | None = None
    text: str | None = None
    size: str = "tiny"
    dtype: str = "float32"
    steps: int = 50
    batch: int = 8
    sequence: int = 64
    microbatches: int = 1
    schedule: str | None = None
    chunks: int | None = None
    optimizer: str = "adamw"
    lr: float | None = None
    warmup: int = 0
    weight_decay: float = 0.01
    clip_norm: float = math.inf
    seed: int = 0
    amp: str = NONE
    loss_scale: float | None = None
    recompute: str = NONE
    zero: int = 0
    checkpoint: str | None = None
    every: int = 10
    resume: bool = False
    elastic: bool = False
    meshes: str | None = None
    tolerance: float | None = None

    def arguments(self) -> list[str]:
        """Return the options as command-line arguments: all that are not ``None``, so that no preset overrides them."""
        arguments = []
        for name, value in dataclasses.asdict(self).items():
            if value is True:
                arguments.append(option(name))
            elif value is not None and value is not False:
                arguments += [option(name), str(value)]
        return arguments


def option(name: str) -> str:
    """Return ``--clip-norm`` for ``clip_norm``."""
    return "--" + name.replace("_", "-")


def options_of(explicit: Mapping[str, Any]) -> TrainOptions:
    """Merge explicit options over those of their preset over the defaults. ``check`` refuses an unknown preset."""
    preset = TRAININGS.get(explicit.get("preset") or "")
    merged = dict(preset.options) if preset else {}
    if explicit.get("amp", merged.get("amp")) != merged.get("amp"):
        merged.pop("loss_scale", None)  # it belongs to the preset's mixed precision
    return TrainOptions(**{**merged, **explicit})


LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (  # option, its condition, and the condition in words
    ("steps", lambda n: n >= 1, "at least 1"),
    ("batch", lambda n: n >= 1, "at least 1"),
    ("sequence", lambda n: n >= 2, "at least 2: a byte and the next one"),
    ("microbatches", lambda n: n >= 1, "at least 1"),
    ("chunks", lambda n: n >= 1, "at least 1"),
    ("lr", lambda x: math.isfinite(x) and x > 0, "above 0, such as 0.002"),
    ("warmup", lambda n: n >= 0, "0 or more steps"),
    ("weight_decay", lambda x: math.isfinite(x) and x >= 0, "0 or more, such as 0.01"),
    ("clip_norm", lambda x: x > 0, "above 0, such as 1; inf only measures"),
    ("loss_scale", lambda x: math.isfinite(x) and x >= 1, "1 or more, such as 1024"),
    ("zero", lambda n: 0 <= n <= 3, "0, 1, 2 or 3"),
    ("every", lambda n: n >= 1, "at least 1"),
    ("seed", lambda n: 0 <= n < 2**32, "between 0 and 2**32 - 1"),
    ("timeout", lambda x: math.isfinite(x) and x > 0, "above 0, in seconds"),
    ("tolerance", lambda x: x >= 0, "0 or more, such as 1e-4"),
    ("port", lambda n: 1 <= n <= 65535, "between 1 and 65535"),
)
