"""Turn a config into a run: recipe slots, choice of speedups, memory, checks before the start."""
