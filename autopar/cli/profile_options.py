"""Define the options of ``autopar profile step``, as on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cli.models.options import ModelOptions
from autopar.cli.output import OutputOptions
from autopar.cli.train.options import NONE
from autopar.runtime.measuring.clock import Effort


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(ModelOptions, OutputOptions):
    """The options of ``autopar profile step`` and their defaults."""

    mesh: str = "dp=2,tp=2"
    plan: str | None = None
    machine: str | None = None
    device: str = "cpu"
    optimizer: str = "adamw"
    microbatches: int = 1
    schedule: str | None = None
    chunks: int | None = None
    amp: str = NONE
    recompute: str = NONE
    zero: int = 0
    clip_norm: float | None = None
    seconds: float = Effort.seconds
    interference: bool = False
    save: str | None = None
