"""Architectures of other tools: one file per family, with its config.json and its tensors.

A family states both directions, so that reading and export use one table: from config.json to the
keys under `model.` and back, and from its tensors to flatout's and back. `table.py` has what such
tables are made of. Drop in a file that assigns ARCHITECTURE, and both find it.
"""
