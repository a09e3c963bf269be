"""The models, one per file, and the layers that they share."""
