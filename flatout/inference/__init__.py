"""Use a trained run: load it, score it, generate text."""
