"""Place the stages of a pipelined step on their ranks, and plan what goes between them."""
