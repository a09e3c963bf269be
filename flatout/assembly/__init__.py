"""From a config to a run that can start: the recipe's slots, the choice of speedups, memory, checks
before the start.
"""
