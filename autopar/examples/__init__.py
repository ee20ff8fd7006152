"""Show autopar at work in runnable files, and hold the models that tests and benchmarks share."""
