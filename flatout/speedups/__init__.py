"""One speedup per file, which owns its code, its promise and its default."""
