"""Measurements: what a run costs and gains, what holds it back, and what it will take."""
