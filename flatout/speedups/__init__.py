"""One file an optimisation; each is one value."""
