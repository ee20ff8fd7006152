"""Show autopar at work: models that tests and benchmarks share, and how to measure the memory of a call."""
