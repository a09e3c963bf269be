"""Instruments that show where the time of steps goes, and the evidence that they collect."""
