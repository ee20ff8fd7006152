"""Call a model whose parameters are on the stages of a pipeline."""
