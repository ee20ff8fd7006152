"""Offer the command ``autopar``."""

from autopar.cli.app import app

__all__ = ["app"]
