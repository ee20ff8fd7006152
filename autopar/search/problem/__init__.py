"""Turn a program into a factor graph: strategies, homes, constraints, shared transfers and the end of a step."""
