"""`flatout.watch`: the verdict of `diagnose` about any PyTorch loop."""
