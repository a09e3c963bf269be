"""What a run will need before it starts: memory, time, energy and cost, without data or a GPU."""
