"""Prove how far a plan can be from the cheapest: its price, and a lower bound of the prices of all plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.costs.machine import Machine

TOLERANCE = 1.0  # nanoseconds: prices are whole, so a bound that is nearer than this proves that no plan is cheaper


@dataclass(frozen=True)
class Certificate:
    """The price of the plan that a search found, and the lower bound that it proved.

    Attributes:
        machine: the machine whose seconds are added up.
        nanoseconds: the price of the explicit program, or of the whole step.
        least: a lower bound of the prices of all plans, in nanoseconds.
        search_seconds: how long the search took.
        reason: why the search ended without a proof; "" if it ended with one.
        memory: the most bytes that a rank may use in these plans; ``None`` if there is no limit.
        bytes: what a rank uses at the peak of the plan, as the search estimates it; ``None`` without a limit.
        constrained: whether layouts were given, so that the bound is that of the plans which have them.
    """

    machine: Machine
    nanoseconds: int
    least: float
    search_seconds: float
    reason: str
    memory: float | None = field(default=None, kw_only=True)
    bytes: int | None = field(default=None, kw_only=True)
    constrained: bool = field(default=False, kw_only=True)

    @property
    def seconds(self) -> float:
        """The price of the plan, in seconds."""
        return self.nanoseconds / 1e9

    @property
    def bound(self) -> float:
        """No plan takes less than so many seconds."""
        return self.least / 1e9

    @property
    def exact(self) -> bool:
        """Whether no plan is cheaper; if some layouts were given, no plan that has them."""
        return self.least > self.nanoseconds - TOLERANCE

    @property
    def gap(self) -> float:
        """How much dearer than the bound the plan is, relative to the bound."""
        return 0.0 if self.exact else self.nanoseconds / self.least - 1 if self.least > 0 else math.inf

    @property
    def about_machine(self) -> tuple[str, ...]:
        """A line that says so, where the figures are of no particular machine."""
        return (self.machine.note,) if self.machine.kind == "any" and self.machine.note else ()

    @property
    def about_memory(self) -> tuple[str, ...]:
        """A line that says that memory has no limit, where the machine does not know one."""
        if self.memory is not None or self.machine.capacity is not None:
            return ()
        return (f"{self.machine.name} has no known capacity, so memory has no limit; memory= gives one, in bytes",)

    @property
    def proof(self) -> str:
        """How much cheaper a plan could be at most, in words."""
        plan = "plan with these constraints" if self.constrained else "plan"
        if self.exact:
            return f"no {plan} is cheaper"
        if self.least <= 0:
            return f"how much cheaper a {plan} could be is not known"
        return f"no {plan} is more than {at_most(1 - self.least / self.nanoseconds)} cheaper"

    @property
    def runs(self) -> str:
        """What has the price, in words."""
        return "a call"

    @property
    def certificate(self) -> str:
        """The price, and how much cheaper a plan could be at most, in a sentence."""
        within = "" if self.memory is None else f" within {bytes_text(self.memory)} a rank"
        digits = 3 if self.nanoseconds >= 10_000 or not self.nanoseconds else 6
        price = f"{self.nanoseconds / 1e6:,.{digits}f} ms {self.runs} on {self.machine.name}{within}"
        why = f"; {self.reason}" * (not self.exact and bool(self.reason))
        return f"searched in {self.search_seconds:.1f} s: {price}, and {self.proof}{why}"


def at_most(part: float) -> str:
    """Return a part as percents, rounded up to two digits: ``0.01%`` is the smallest that is not 0."""
    hundredths = math.ceil(part * 1e4 - 1e-9) if math.isfinite(part) else part
    return f"{max(hundredths, part > 0) / 100:.2f}%"


def bytes_text(bytes: float) -> str:
    """Return a size with its unit: ``80.0 GB``."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes >= factor:
            return f"{bytes / factor:,.1f} {unit}"
    return f"{bytes:,.0f} bytes"
