"""Decide the layout of every value: read plans and presets, apply them to a program, and propagate them."""
