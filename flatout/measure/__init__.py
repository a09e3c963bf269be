"""Measures the cost of a run and the gain of each optimisation, with repeats and intervals."""
