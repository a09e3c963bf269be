"""Checkpoints: their content, how they are saved and loaded, and which ones a run has."""
