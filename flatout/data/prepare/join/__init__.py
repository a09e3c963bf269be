"""Packed ranges to a dataset: duplicates dropped, tokens joined into shards."""
