"""Compare what was found with plans that are known: presets on every assignment of axes."""
