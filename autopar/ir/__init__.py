"""Hold programs: meshes, layouts, records, transfers, edits, and the text that a program prints as and parses from."""
