"""Trials: runs in processes of their own, repeated and compared with intervals."""
