"""Split rules as users write them: `tail F` or `hash F`."""

from __future__ import annotations

import re

from flatout.errors import DataError

NAMED = "named"
"""The split rule of a dataset whose validation text is given separately."""


def parse_rule(text: str) -> tuple[str, float]:
    """Return the kind, `tail` or `hash`, and the fraction of a split rule.

    Raises: DataError when the text is not a split rule.
    """
    match = re.fullmatch(r"\s*(tail|hash)[\s:=]+([0-9.eE-]+)\s*", text)
    try:
        kind, fraction = (match[1], float(match[2])) if match else ("", 0.0)
    except ValueError:
        kind, fraction = "", 0.0
    if not 0 < fraction < 1:
        raise DataError(
            f"{text!r} is not a split rule.",
            fix="Write 'tail 0.1' (the last tenth) or 'hash 0.01' (one document in a hundred).",
        )
    return kind, fraction
