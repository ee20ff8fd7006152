"""Run the passes of the stages, slot by slot, on real processes or simulated."""
