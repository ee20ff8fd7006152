"""Define the options that say which model a command is about, and with which arguments it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of a model and their defaults."""

    model: str = "tiny"
    example: str | None = None
    inputs: str | None = None
    set: Sequence[str] = ()
    batch: int = 8
    sequence: int = 64
