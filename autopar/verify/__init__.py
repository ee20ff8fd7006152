"""Verify programs: what each level promises, and whether the communication of all ranks comes to an end."""

from autopar.verify.levels import verify

__all__ = ["verify"]
