"""`tune`: the fastest setting of a recipe on this machine."""
