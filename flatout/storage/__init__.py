"""Durable files, streams, JSON, caches and URLs."""
