"""Place, save and load what lasts between steps: the optimizer's state, averages, counts."""
