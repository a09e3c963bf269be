"""Encodes the pieces of a conversation, each on its own."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flatout.conversation.rendering import Piece
from flatout.data.tokenizers.base import Ids, Tokenizer
from flatout.sources.long import chunks_of


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[tuple[Ids, bool]]:
    """Return the ids of each piece, and whether the loss counts them.

    Raises: NotEncodable when the vocabulary cannot express a piece.
    """
    special = tokenizer.special_tokens()
    return [
        (
            np.array([special[piece.text]], np.uint32)
            if piece.is_special
            else np.concatenate(list(tokenizer.encode_stream(chunks_of(piece.text)))),
            piece.is_target,
        )
        for piece in pieces
    ]
