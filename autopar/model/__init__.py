"""What a model on a mesh and its training step share of a call."""
