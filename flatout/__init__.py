"""flatout trains language models at the limit of the hardware, and proves it."""
