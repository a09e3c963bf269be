"""What is done with a finished run: load it, evaluate it, generate text."""
