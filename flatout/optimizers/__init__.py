"""One file an optimizer, and the schedules."""
