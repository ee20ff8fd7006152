"""Whether this process was launched as a rank of a job, by ``torchrun`` or by this command: the environment says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cli.train.refused import Refused


@dataclass(frozen=True)
class Launched:
    """One rank's place in a job; ``local`` is among the processes of one machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """The place of this process in its job, or ``None`` when it is on its own."""
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
        raise Refused(f"the environment's {name}={value!r} is not a number; start the job with torchrun, or unset {name}")
    return int(value)
