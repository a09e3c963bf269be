"""The request: options, what each SOURCE names, and the description that identifies a dataset."""
