"""The run directory: its layout and lock, finding one by name, and where its dataset is now."""
