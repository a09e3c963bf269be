"""Several processes: the mesh, data parallelism, and how processes find each other."""
