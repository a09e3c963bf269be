"""The dataset format on disk: manifest, shards, order, mixes, verification, copies of URLs."""
