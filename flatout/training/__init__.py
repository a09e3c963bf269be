"""Stage 2: the step, the loop, the state and what is written about them."""
