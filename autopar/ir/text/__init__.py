"""The program as text: it prints itself, one line per value, and parses back. The grammar is in ``GRAMMAR.md``."""
