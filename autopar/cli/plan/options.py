"""Define the options of the commands that plan a model, as on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cli.models.options import ModelOptions
from autopar.cli.output import OutputOptions
from autopar.cli.train.options import NONE

MESH = "dp=2,tp=2"  # without --mesh and --devices


@dataclass(frozen=True, kw_only=True)
class PlannedOptions(ModelOptions, OutputOptions):
    """What is planned, on which machines: the options that ``plan``, ``report``, ``page`` and ``verify`` have."""

    mesh: str | None = None
    devices: int | None = None
    plan: str = "search"
    machine: str | None = None
    memory: float | None = None
    time_limit: float = 60.0
    cache: str | None = None
    optimizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlannedOptions):
    """The options of ``autopar plan`` and their defaults."""

    compare: bool = False
    save: str | None = None
    diff: str | None = None
    explain: Sequence[str] = ()
    html: str | None = None


@dataclass(frozen=True, kw_only=True)
class PageOptions(PlannedOptions):
    """The options of ``autopar page`` and their defaults."""

    output: str = "autopar.html"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(PlannedOptions):
    """The options of ``autopar verify`` and their defaults; ``NONE`` stands for no recomputation."""

    run: bool = False
    rank: int | None = None
    microbatches: int = 1
    recompute: str = NONE
    zero: int = 0
    schedule: str | None = None
    chunks: int | None = None
