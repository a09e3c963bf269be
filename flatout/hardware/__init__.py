"""This machine and the machines that are known: peaks, memory, rooflines."""
