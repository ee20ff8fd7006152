"""Run ``autopar plan``: find the cheapest plan of a model, or compare it with the presets."""
