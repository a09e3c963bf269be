"""What a run can reach, and what it reaches."""
