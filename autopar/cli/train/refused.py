"""The error of a request that cannot be followed."""

from __future__ import annotations

from autopar.errors import AutoparError


class Refused(AutoparError, ValueError):
    """An option of the command, or two that do not fit each other. One line, which ends with the remedy."""
