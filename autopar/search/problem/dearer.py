"""End a search early where no plan can be cheaper than one that is known."""

from __future__ import annotations

from autopar.errors import AutoparError


class NotCheaper(AutoparError):
    """No plan costs less than one that is known. ``least``: what each costs at least, in nanoseconds."""

    least: float = 0.0


def refuse_dearer(least: float, below: float) -> None:
    """Raise ``NotCheaper`` if plans cost at least ``least`` nanoseconds, and only cheaper ones than ``below`` count."""
    if least >= below:
        error = NotCheaper(f"no plan takes less than {least / 1e6:,.3f} ms, and one of {below / 1e6:,.3f} ms is known")
        error.least = least
        raise error
