"""Run local programs: on this rank's process, or on all ranks simulated in one process."""
