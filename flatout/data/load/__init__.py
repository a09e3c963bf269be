"""What a training step reads: batches in a seekable order, and the feeds that deliver them."""
