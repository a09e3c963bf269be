"""Experiments: paired trials in fresh processes, for `flatout bench` and `flatout tune`."""
