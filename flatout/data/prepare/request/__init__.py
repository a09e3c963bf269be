"""The request: options, sources, and the description that identifies a dataset."""
