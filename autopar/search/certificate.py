"""Prove how far a plan can be from the cheapest: its price, and a lower bound of the prices of all plans."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """

    machine: Machine
    nanoseconds: int
    least: float
    search_seconds: float
    reason: str

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
        """Whether no plan is cheaper."""
        return self.least > self.nanoseconds - TOLERANCE

    @property
    def gap(self) -> float:
        """How much dearer than the bound the plan is, relative to the bound."""
        return 0.0 if self.exact else self.nanoseconds / self.least - 1 if self.least > 0 else math.inf

    @property
    def certificate(self) -> str:
        """The price, and how much cheaper a plan could be at most, in a sentence."""
        cheaper = 0.0 if self.exact else 1 - self.least / self.nanoseconds
        proof = "no plan is cheaper" if self.exact else f"no plan is more than {cheaper:.2%} cheaper"
        price = f"{self.nanoseconds / 1e6:,.3f} ms a step on {self.machine.name}"
        why = f"; {self.reason}" * (not self.exact and bool(self.reason))
        return f"searched in {self.search_seconds:.1f} s: {price}, and {proof}{why}"
