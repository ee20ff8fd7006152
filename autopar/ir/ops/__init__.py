"""Register the ops that autopar adds to torch's. Each comes apart along a dim that torch's own op needs whole."""
