"""Verify programs: what each level promises, and whether the communication of all ranks comes to an end."""
