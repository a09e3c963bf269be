"""Decode tokens while they are generated: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

UNDECODED = "\ufffd"
"""The character that tokenizers return for incomplete bytes."""


class DecodedText:
    """The text of ids that arrive one at a time after a prompt.

    The text of an id can depend on its neighbours: the first word of a text loses its space, and
    several bytes make up a character. Each id is therefore decoded together with those before it
    that had the last text, and its text is held back while it may still change.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids)
        self._returned = len(self._ids)
        """How many of the ids have text that was returned."""

    def push(self, token: int) -> str:
        """Append a token and return the text that is now final."""
        self._ids.append(token)
        text = self.rest()
        if not text or text.endswith(UNDECODED):
            return ""
        self._ids = self._ids[self._returned :]
        self._returned = len(self._ids)
        return text

    def rest(self) -> str:
        """Return the text that was held back."""
        returned = self._tokenizer.decode(self._ids[: self._returned])
        return self._tokenizer.decode(self._ids)[len(returned) :]


class StoppedText:
    """Text that ends before the first stop string, which may arrive in several pieces.

    The end of the text is held back while it may be the start of a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Append a piece and return the text that can be shown."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [start for start in map(text.find, self._stop) if start >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        prefixes = (s[:n] for s in self._stop for n in range(1, len(s)))
        held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return the text that was held back, after the last piece."""
        held, self._held = self._held, ""
        return held
