"""Stage 2: train. The loop and its step, the state that a checkpoint holds, and what is logged."""
