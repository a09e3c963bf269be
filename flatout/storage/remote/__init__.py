"""Moves files between this machine and URLs through fsspec, with retries, resume and checksums."""
