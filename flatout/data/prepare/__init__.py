"""From text to packed shards, once: inputs, tokenizing in workers, merging."""
