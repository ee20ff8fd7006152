"""Run the programs of all ranks in one process, without a process group."""
