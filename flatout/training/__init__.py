"""Stage 2: train. The loop and its step, the state in a checkpoint, and logging."""
