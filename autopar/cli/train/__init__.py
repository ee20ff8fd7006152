"""Training a small Llama on a mesh and on a single device, to see that the losses are the same: ``autopar train``."""
