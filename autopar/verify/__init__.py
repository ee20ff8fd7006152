"""Verify programs: the promises of each level, and that the communication of all ranks finishes."""
