"""Print programs as text, one line per value, and parse such text. ``GRAMMAR.md`` has the grammar."""
