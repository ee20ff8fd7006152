"""Register the ops that autopar adds to torch's. Each can be split along a dim that torch's own op needs whole."""
