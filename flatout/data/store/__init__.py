"""The dataset on disk: manifest, shards, order, mixes, verification, copies at an address."""
