"""Schedule programs: which parts of them run as one, in which order, and how that is written."""
