"""The run directory: its files, its lock, how it resumes, and how it is found by name."""
