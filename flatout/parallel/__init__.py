"""Several processes: the mesh and what is done along each of its axes."""
