"""`bench`: the gain of each speedup, as tables and pictures."""
