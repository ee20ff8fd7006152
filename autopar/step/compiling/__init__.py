"""Compile the programs of a training step from a captured call."""
