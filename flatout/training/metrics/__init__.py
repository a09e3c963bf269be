"""What a run measures of itself: the log, clocks, observers, compilations."""
