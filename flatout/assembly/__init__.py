"""Turn a config into a run: parts, choice of speedups, memory, checks before the start."""
