"""What feeds every step: batches in order, the feed, length buckets."""
