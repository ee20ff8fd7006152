"""Hold the time of one distinct call of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProfileRow:
    """The time of one distinct call.

    Attributes:
        call: what is called, as ``costs.calls`` writes it.
        kind: ``op``, ``exchange`` for transfers in which ranks communicate, ``local`` for the others.
        seconds: the median seconds of one call on the slowest rank; the price if it was not measured.
        price: the seconds of one call by the machine's figures.
        times: phase → how often a step runs the call.
        group: the transfer and the axes of an exchange: ``all_reduce over tp``; else "".
        startup: θ, the start-up seconds of an exchange; at most ``seconds``.
        why: the reason why the call was not measured; "" if it was.
    """

    call: str
    kind: str
    seconds: float
    price: float
    times: Mapping[str, int] = field(default_factory=dict)
    group: str = ""
    startup: float = 0.0
    why: str = ""

    @property
    def total(self) -> float:
        """The seconds of all these calls of a step."""
        return sum(self.times.values()) * self.seconds
