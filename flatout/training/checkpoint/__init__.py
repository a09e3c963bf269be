"""Checkpoints: what they hold, how they are saved and loaded, and which ones a run has."""
