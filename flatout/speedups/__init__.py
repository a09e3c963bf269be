"""One speedup per file or folder, which owns its code, its promise and its default."""
