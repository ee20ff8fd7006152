"""Put a model on a mesh: its parameters, its calls and their inputs, and what was captured of them."""
