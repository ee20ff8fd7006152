"""Cut the traced program of a micro-batch into one program for each stage."""
