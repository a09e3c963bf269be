"""The plain way: the text of every window is tokenised inside the training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.shards import Split

if TYPE_CHECKING:
    from flatout.data.tokenizer import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]

KEPT_TEXTS = 65_536
"""Windows whose text is kept; above it the oldest go."""


class TokenisingWindows:
    """Tokenises the text of each window when it is read, one window after the other, as a plain training script does.

    What is handed out are the packed tokens themselves: a window cut anywhere need not tokenise back to the same ids, and
    the losses of two runs can only be compared over the same windows. The text comes from `prime`, so that taking it is not
    measured as tokenising; a window that was not primed is decoded when it is first read.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[tuple[str, int, int], str] = {}
        self.tokens_encoded = 0
        """Tokens the tokenizer made inside `read` so far."""

    def prime(self, split: Split, indices: Array, seq_len: int) -> None:
        """Take the text of windows that will be read.

        Shapes:  indices (N,).
        """
        for index in indices.tolist():
            self._text(split, index, seq_len)

    def read(self, split: Split, indices: Array, out: Array) -> None:
        """Tokenise the text of each window, then write window indices[n] of `split` into out[n].

        Shapes:  indices (N,), out (N, W), dtype of the split.
        """
        seq_len = out.shape[1] - 1
        for index in indices.tolist():
            self.tokens_encoded += len(self._tokenizer.encode(self._text(split, index, seq_len)))
        split.read_windows(indices, seq_len, out)

    def _text(self, split: Split, index: int, seq_len: int) -> str:
        key = (split.name, index, seq_len)
        if key not in self._texts:
            tokens = split.read_tokens(index * seq_len, index * seq_len + seq_len + 1)
            if len(self._texts) >= KEPT_TEXTS:
                del self._texts[next(iter(self._texts))]
            # End-of-text is no text: a tokenizer would spell its name out, or refuse it.
            self._texts[key] = self._tokenizer.decode(tokens[tokens != self._tokenizer.eot_id].tolist())
        return self._texts[key]
