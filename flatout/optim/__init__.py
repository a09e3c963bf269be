"""The optimizers, one per file, and the learning-rate schedules."""
