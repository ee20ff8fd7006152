"""Report what a pipelined step runs, and how long and how large it is."""
