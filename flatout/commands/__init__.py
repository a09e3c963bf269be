"""One file a command: typed arguments, a call, a typed result."""
