"""Finds positions where a text can be cut without changing its ids.

The known patterns (GPT-2's, cl100k's and its relatives in Llama 3 and Qwen 2, o200k's) look ahead
and never behind. When a split falls on a cut, the right side therefore splits as before; the left
side does too if its last piece ends in the same way without what follows. By the patterns, both
hold at three kinds of positions:
- before a space that follows a non-space, since no alternative matches across the two;
- before a line end that follows an ASCII letter or digit, for the same reason;
- after a single line end and before a character that is neither white space nor a slash, since only
  o200k continues after a line end, and only with a slash.

For other patterns the same positions are tried, and a position is accepted if the ids of the two
sides equal the ids of the whole, with two different left sides.
"""

from __future__ import annotations

import re
from itertools import islice

import numpy as np

from flatout.data.tokenizers.base import LOOKAHEAD_CHARACTERS, Encode

CUT = re.compile(r"(?<=\S)(?= )|(?<=[A-Za-z0-9])(?=[\r\n])|(?<=\S\n)(?=[^\s/])")
r"""A position of these three kinds; Python's \s includes all white space of Unicode."""

MAX_TRIES = 64
"""Positions tried before a text is considered impossible to cut."""


def known_cut(text: str, start: int, end: int) -> int | None:
    """Return the first position in `start`..`end` that no known pattern matches across."""
    match = CUT.search(text, start, end)
    return match.start() if match else None


def confirmed_cut(encode: Encode, text: str, start: int, end: int) -> int | None:
    """Return the first position where both sides encode separately to the ids of the whole.

    Positions near the end of the text are not tried, so that text after it cannot matter.
    """
    last = min(end, len(text) - LOOKAHEAD_CHARACTERS)
    for match in islice(CUT.finditer(text, start, last), MAX_TRIES):
        cut = match.start()
        right = text[cut : cut + LOOKAHEAD_CHARACTERS]
        right_ids = encode(right)
        lefts = (text[max(cut - LOOKAHEAD_CHARACTERS // part, 0) : cut] for part in (1, 2))
        if all(
            np.array_equal(np.concatenate([encode(left), right_ids]), encode(left + right))
            for left in lefts
        ):
            return cut
    return None
