"""Let collectives cross the end of a step, and complete a step."""
