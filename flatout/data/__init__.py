"""Stage 1: text to packed shards, and shards to batches."""
