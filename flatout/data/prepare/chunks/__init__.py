"""Chunks of tokens that another pipeline saved: finding them, their metadata, reading tensors."""
