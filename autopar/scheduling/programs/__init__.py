"""Schedule programs: split them into functions, decide the order of each, and write it into the programs of ranks."""
