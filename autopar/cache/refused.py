"""Define why a capture is not kept for another process."""

from __future__ import annotations


class NotCached(Exception):
    """Something has no form that another process could read or compare. The text says what."""
