"""The variants of an op: the functions that must match its reference."""

import inspect


def variants(op):
    """Return the public functions of `op` that share the signature of its `reference`, by name."""
    signature = inspect.signature(op.reference)
    return {
        name: value
        for name, value in vars(op).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and inspect.signature(value) == signature
    }
