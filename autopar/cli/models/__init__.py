"""Make the model that a command is about, and the arguments of one call."""
