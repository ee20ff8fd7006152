"""Say what the tensors of a trace hold at each position, where that follows from positions alone."""
