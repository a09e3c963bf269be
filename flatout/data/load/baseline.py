"""The baseline, which tokenises the text of every sequence inside the training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flatout.data.store.integrity import Array
from flatout.data.store.mix import SplitReader

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

KEPT_TEXTS = 65_536
"""Sequences per split whose text is cached. The oldest is dropped beyond this number."""


class TokenisingReader:
    """Tokenises the text of each sequence when it is read, as a plain training script does.

    It returns the packed tokens, not the ids it computes: the text of a sequence cut mid-document
    may tokenise to other ids, and losses are only comparable on identical sequences. `prime` caches
    the text, so that decoding is not measured as tokenising. A sequence that was not primed is
    decoded on first read.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[tuple[SplitReader, int], dict[int, str]] = {}
        self.tokens_encoded = 0
        """Tokens that the tokenizer has produced in `read`."""

    def prime(self, split: SplitReader, indices: Array, seq_len: int) -> bool:
        """Cache the text of the sequences `indices`, and return whether there is room for more.

        Shapes:  indices (N,).
        """
        texts = self._texts_of(split, seq_len)
        most = min(KEPT_TEXTS, split.num_sequences(seq_len))
        for index in indices.tolist():
            if len(texts) >= most:
                return False
            self._text(split, index, seq_len)
        return len(texts) < most

    def read(self, split: SplitReader, indices: Array, seq_len: int, out: Array) -> None:
        """Tokenise the text of each sequence, then write its packed tokens into out[n].

        Shapes:  indices (N,), out (N, T + 1), dtype of the split.
        """
        for index in indices.tolist():
            self.tokens_encoded += len(self._tokenizer.encode(self._text(split, index, seq_len)))
        split.read_sequences(indices, seq_len, out)

    def _texts_of(self, split: SplitReader, seq_len: int) -> dict[int, str]:
        return self._texts.setdefault((split, seq_len), {})

    def _text(self, split: SplitReader, index: int, seq_len: int) -> str:
        texts = self._texts_of(split, seq_len)
        if index not in texts:
            tokens_1W = np.empty((1, seq_len + 1), split.dtype)
            split.read_sequences(np.array([index]), seq_len, tokens_1W)
            tokens = tokens_1W[0]
            if len(texts) >= KEPT_TEXTS:
                del texts[next(iter(texts))]
            # Encoding the decoded end-of-text token would yield several tokens, or fail.
            texts[index] = self._tokenizer.decode(tokens[tokens != self._tokenizer.eot_id].tolist())
        return texts[index]
