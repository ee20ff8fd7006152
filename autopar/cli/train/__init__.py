"""Run ``autopar train``: train a small Llama on a mesh and on a single device, and compare the losses."""
