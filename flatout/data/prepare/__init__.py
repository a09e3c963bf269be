"""From text to packed shards: request, plan, workers that pack ranges, join.

`pipeline.py`, `upload.py`, `import_tokens.py` and `writer.py` are the entry points.
"""
