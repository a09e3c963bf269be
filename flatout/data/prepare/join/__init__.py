"""From packed ranges to a dataset: drop duplicates, and join the tokens into shards."""
