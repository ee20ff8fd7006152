"""Report what was done to a program, as tables for people."""
