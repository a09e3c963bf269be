"""What you do with a trained run: load it, score it, generate text."""
