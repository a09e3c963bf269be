"""Where a text may be cut without changing its ids.

The known ways to split text (GPT-2's, cl100k's and its kin in Llama 3 and Qwen 2, o200k's) look
ahead and never back, so the right side of a cut splits as it did when a split falls there; the left
side does when its end looks the same to its last piece. Both hold in three places, by the patterns:
before a space after anything that is no space, since no alternative goes on from one to the other;
before a line end after an ASCII letter or digit, for the same reason; after a line end that stands
alone and before what is neither a space nor a slash, since only o200k goes on after a line end, and
only with a slash.

For other ways, the same places are tried, and one is taken where encoding the sides apart and
together gives the same ids, seen from two beginnings.
"""

from __future__ import annotations

import re
from itertools import islice

import numpy as np

from flatout.data.tokenizers.base import AHEAD_CHARACTERS, Encode

PLACE = re.compile(r"(?<=\S)(?= )|(?<=[A-Za-z0-9])(?=[\r\n])|(?<=\S\n)(?=[^\s/])")
"""A place of these three kinds; white space as Python has it includes all that Unicode has."""

TRIED = 64
"""Places looked at before a text counts as one that cannot be cut."""


def known_cut(text: str, place: int, end: int) -> int | None:
    """Return the first place from `place` up to `end` where no known way to split text joins what
    is on either side.
    """
    found = PLACE.search(text, place, end)
    return found.start() if found else None


def confirmed_cut(encode: Encode, text: str, place: int, end: int) -> int | None:
    """Return the first place where encoding both sides apart gives the ids of both together, from
    two beginnings.

    Only places far enough from the end are looked at, so that what comes after the end decides
    nothing.
    """
    for found in islice(PLACE.finditer(text, place, min(end, len(text) - AHEAD_CHARACTERS)), TRIED):
        cut = found.start()
        right = text[cut : cut + AHEAD_CHARACTERS]
        right_ids = encode(right)
        lefts = (text[max(cut - AHEAD_CHARACTERS // part, 0) : cut] for part in (1, 2))
        if all(
            np.array_equal(np.concatenate([encode(left), right_ids]), encode(left + right))
            for left in lefts
        ):
            return cut
    return None
