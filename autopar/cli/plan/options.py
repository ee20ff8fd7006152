"""Define the options of ``autopar plan``, as on the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``autopar plan`` and their defaults."""

    model: str = "tiny"
    mesh: str = "dp=2,tp=2"
    plan: str = "search"
    compare: bool = False
    machine: str | None = None
    memory: float | None = None
    time_limit: float = 60.0
    optimizer: str | None = None
    batch: int = 8
    sequence: int = 64
    save: str | None = None
