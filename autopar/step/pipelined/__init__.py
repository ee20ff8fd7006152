"""Run a training step on the stages of a pipeline."""
