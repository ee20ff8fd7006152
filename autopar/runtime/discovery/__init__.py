"""Discover the rule of an op that has none, by running the op on small pieces."""

from autopar.runtime.discovery import discover as discover  # importing it registers it with the rules
