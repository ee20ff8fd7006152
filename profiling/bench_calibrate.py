"""Measure how long collectives take on this machine; with --write, write a machine description."""

from autopar.costs.calibrate import arguments, run

PROFILES_ITSELF = True  # in other processes

__all__ = ["PROFILES_ITSELF", "arguments", "run"]
