"""Define the error of options that are refused."""

from __future__ import annotations

from autopar.errors import AutoparError


class Refused(AutoparError, ValueError):
    """An option of the command is wrong, or two do not fit each other.

    The message is one line, which ends with the remedy.
    """
