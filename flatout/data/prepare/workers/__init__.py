"""Processes that pack ranges: on this machine, or on the nodes of a Ray cluster."""
