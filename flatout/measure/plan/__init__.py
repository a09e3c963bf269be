"""`plan`: what a run will take, before it starts."""
