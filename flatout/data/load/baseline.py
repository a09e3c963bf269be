"""The plain way: the text of every window is tokenised inside the training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.store.shards import SplitReader

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]

KEPT_TEXTS = 65_536
"""Windows of a split whose text is kept; above it the oldest go."""


class TokenisingReader:
    """Tokenises the text of each window when it is read, one window after the other, as a plain
    training script does.

    What is handed out are the packed tokens themselves: a window cut anywhere need not tokenise
    back to the same ids, and the losses of two runs can only be compared over the same windows. The
    text comes from `prime`, so that taking it is not measured as tokenising; a window that was not
    primed is decoded when it is first read.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[tuple[SplitReader, int], dict[int, str]] = {}
        self.tokens_encoded = 0
        """Tokens the tokenizer made inside `read` so far."""

    def prime(self, split: SplitReader, indices: Array, seq_len: int) -> bool:
        """Take the text of windows that will be read, as long as there is room for it; return
        whether more can be taken.

        Shapes:  indices (N,).
        """
        texts = self._texts_of(split, seq_len)
        most = min(KEPT_TEXTS, split.num_sequences(seq_len))
        for index in indices.tolist():
            if len(texts) >= most:
                return False
            self._text(split, index, seq_len)
        return len(texts) < most

    def read(self, split: SplitReader, indices: Array, out: Array) -> None:
        """Tokenise the text of each window, then write window indices[n] of `split` into out[n].

        Shapes:  indices (N,), out (N, W), dtype of the split.
        """
        seq_len = out.shape[1] - 1
        for index in indices.tolist():
            self.tokens_encoded += len(self._tokenizer.encode(self._text(split, index, seq_len)))
        split.read_sequences(indices, seq_len, out)

    def _texts_of(self, split: SplitReader, seq_len: int) -> dict[int, str]:
        return self._texts.setdefault((split, seq_len), {})

    def _text(self, split: SplitReader, index: int, seq_len: int) -> str:
        texts = self._texts_of(split, seq_len)
        if index not in texts:
            window_1W = np.empty((1, seq_len + 1), split.dtype)
            split.read_sequences(np.array([index]), seq_len, window_1W)
            tokens = window_1W[0]
            if len(texts) >= KEPT_TEXTS:
                del texts[next(iter(texts))]
            # End-of-text is no text: a tokenizer would spell its name out, or refuse it.
            texts[index] = self._tokenizer.decode(tokens[tokens != self._tokenizer.eot_id].tolist())
        return texts[index]
