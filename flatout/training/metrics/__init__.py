"""Metrics of a run: records, step times, compilations, and the observers that receive them."""
