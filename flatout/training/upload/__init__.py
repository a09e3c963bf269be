"""Copies of a run at a URL: sent while it trains, fetched when its directory is gone."""
