"""One speedup per file, with its code, its tolerance and its default."""
