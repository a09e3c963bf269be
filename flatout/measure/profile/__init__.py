"""`profile`: traces and kernels of some steps."""
