"""Detect from the environment whether ``torchrun`` or this command launched this process as a rank of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cli.train.refused import Refused


@dataclass(frozen=True)
class Launched:
    """The place of a rank in a job; ``local`` is its rank among the processes of one machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Return the place of this process in its job, or ``None`` if it belongs to no job."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    size = _number(environment, "WORLD_SIZE")
    return Launched(
        rank=_number(environment, "RANK"),
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", environment["RANK"]),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", str(size)),
    )


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    value = environment.get(name, default)
    if not value.isdecimal():
        raise Refused(
            f"the environment's {name}={value!r} is not a number; start the job with torchrun, or unset {name}"
        )
    return int(value)
