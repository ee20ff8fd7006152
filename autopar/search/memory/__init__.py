"""Keep a plan within the memory of a rank."""
