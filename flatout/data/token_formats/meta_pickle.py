"""Reads the characters in nanoGPT's meta.pkl, a pickle of dicts, strings and numbers.

A pickle that names a class or a function is rejected, so that nothing in it is called.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

META = "meta.pkl"
MAX_BYTES = 16 << 20
"""Larger than the dict of every character there is."""


class _PlainValues(pickle._Unpickler):
    """Python's own unpickler, whose memory the file bounds. The one in C allocates by an index."""

    def find_class(self, module: str, name: str) -> Any:
        """Reject every class and function."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def characters_in(path: Path) -> str | None:
    """Return the characters of a character vocabulary, in the order of their ids.

    None when the file is absent, or contains anything else.
    """
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        of_id = _PlainValues(io.BytesIO(path.read_bytes())).load()["itos"]
        characters = [of_id[number] for number in range(len(of_id))]
    except Exception:  # a damaged pickle raises errors of any kind
        return None
    if not all(isinstance(one, str) and len(one) == 1 for one in characters):
        return None
    return "".join(characters) if len(set(characters)) == len(characters) > 0 else None
