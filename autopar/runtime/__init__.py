"""Running local programs: ``simulate`` has all ranks in one process."""
