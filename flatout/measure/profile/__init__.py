"""`profile`: traces, kernels and memory of some steps."""
