"""Price transfers in seconds, from the figures of a machine."""
