"""`verify --resume`: trains with and without a stop, and compares every bit."""
