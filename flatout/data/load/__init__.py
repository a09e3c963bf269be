"""What a training step reads: batches in a seekable order, and the loaders that deliver them."""
