"""What a run measures about itself: records, step times, compilations, and who observes them."""
