"""Decode tokens while they are generated: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

KEPT_IDS = 64
"""Number of ids that are decoded again with each new one."""
UNDECODED = "\ufffd"
"""The character that tokenizers return for incomplete bytes."""


class DecodedText:
    """The text of ids that arrive one at a time after a prompt.

    The text of an id can depend on its neighbours: the first word of a text loses its space, and
    several bytes make up a character. Each id is therefore decoded together with those before it,
    and the end of the text is held back while it may still change. Old ids are dropped once the
    remaining ones decode to the same text without them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids)
        self._text = tokenizer.decode(self._ids)
        self._shown = len(self._text)
        self._max_ids = 2 * KEPT_IDS

    def push(self, token: int) -> str:
        """Append a token and return the text that is now final."""
        if len(self._ids) >= self._max_ids and self._shown == len(self._text):
            self._forget()
        self._ids.append(token)
        self._text = self._tokenizer.decode(self._ids)
        return self._show(len(self._text.rstrip(UNDECODED)))

    def rest(self) -> str:
        """Return the text that was held back."""
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self._text[start:end]

    def _forget(self) -> None:
        for kept in range(KEPT_IDS, KEPT_IDS // 2, -1):
            ids = self._ids[-kept:]
            text = self._tokenizer.decode(ids)
            if text and UNDECODED not in text and self._text.endswith(text):
                self._ids, self._text, self._shown = ids, text, len(text)
                self._max_ids = 2 * KEPT_IDS
                return
        self._max_ids = 2 * len(self._ids)


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
