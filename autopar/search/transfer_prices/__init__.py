"""Price the transfers between two states of a value, and what several uses of it share."""
