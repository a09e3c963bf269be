"""The baseline, which tokenises a text for every sequence inside the training step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np

from flatout.data.store.mix import SplitReader
from flatout.storage.files import Array

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

KEPT_TEXTS = 256
"""Sequences whose text is tokenised in turns."""


class TokenisingReader:
    """Tokenises a text for each sequence that is read, as a plain training script does.

    It returns the packed tokens, not the ids it computes: the text of a sequence cut mid-document
    may tokenise to other ids, and losses are only comparable on identical sequences. So the text
    need not be that of the sequence. Those of the first KEPT_TEXTS take turns, and are decoded in
    the first call, so that decoding is not measured as tokenising.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, Iterator[str]] = {}

    def read(self, split: SplitReader, indices: Array, seq_len: int, out: Array) -> None:
        """Tokenise a text for each sequence, then write the packed tokens of sequence n to out[n].

        Shapes:  indices (N,), out (N, T + 1), dtype of the split.
        """
        if seq_len not in self._texts:
            self._texts[seq_len] = cycle(self._first_texts(split, seq_len))
        for text in islice(self._texts[seq_len], len(indices)):
            self._tokenizer.encode(text)
        split.read_sequences(indices, seq_len, out)

    def _first_texts(self, split: SplitReader, seq_len: int) -> list[str]:
        first = np.arange(min(KEPT_TEXTS, split.num_sequences(seq_len)))
        tokens_NW = np.empty((len(first), seq_len + 1), split.dtype)
        split.read_sequences(first, seq_len, tokens_NW)
        # Encoding the decoded end-of-text token would yield several tokens, or fail.
        eot_id, decode = self._tokenizer.eot_id, self._tokenizer.decode
        return [decode(tokens[tokens != eot_id].tolist()) for tokens in tokens_NW]
