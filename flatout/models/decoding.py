"""Incremental decoding: a model keeps state of the tokens it has read, so the next one is cheap.

Letters: B rows, T tokens, V vocabulary, G key and value heads, S slots for keys, C head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from flatout.errors import ShapeError


class Decoder(ABC):
    """Reads a document piece by piece and returns the logits of the next token after each piece.

    `LanguageModel.decoder` creates one. What it keeps in between depends on the model: keys and
    values, a recurrent state of constant size, or only the tokens.
    """

    max_tokens: int | None
    """The maximum number of tokens; None means no limit."""
    num_tokens: int
    """Tokens read so far, per row."""

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0

    @final
    def has_room(self, num_tokens: int) -> bool:
        """Return whether it can read this many more tokens."""
        return self.max_tokens is None or self.num_tokens + num_tokens <= self.max_tokens

    @final
    @torch.no_grad()
    def read(self, tokens_BT: Tensor) -> Tensor:
        """Read more tokens and return the logits of the next one.

        They equal those of a full pass over all tokens read.

        Shapes:  tokens_BT (B, T) integers, T at least 1; every call has the same rows.
        Returns: logits_BV.
        Raises:  ShapeError when there is no room for the tokens.
        """
        num_tokens = tokens_BT.shape[1]
        if num_tokens < 1 or not self.has_room(num_tokens):
            raise ShapeError(
                f"Cannot read {num_tokens} more tokens: the decoder has read {self.num_tokens} of "
                f"at most {self.max_tokens}.",
                fix="Pass at least one token; when the decoder is full, start a new one with the "
                "last part of the text.",
            )
        logits_BV = self.scores_after(tokens_BT)
        self.num_tokens += num_tokens
        return logits_BV

    @abstractmethod
    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Read tokens and return the logits after them; `num_tokens` does not count them yet.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """


@final
class RecomputingDecoder(Decoder):
    """Keeps the tokens and recomputes all of them: slow, but works for every model."""

    def __init__(self, next_logits: Callable[[Tensor], Tensor], max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._next_logits = next_logits
        self._read: list[Tensor] = []

    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits after all tokens, computed from the first one on.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        self._read.append(tokens_BT)
        return self._next_logits(torch.cat(self._read, dim=1))


@final
class KeyValueCache:
    """Keys and values of the last `size` tokens of one attention layer.

    The memory is allocated once, at the first use. The token at position p is stored in slot p
    modulo `size`: the slots are in order until all are used, then each new token replaces the
    oldest. Keys are stored with rotary positions applied.

    Memory: 2 B G size C elements of the keys' dtype. All layers of GPT-2 124M take 36 MiB per row
            for 1,024 tokens in bf16.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept_2BGSC: Tensor | None = None

    def extend(self, k_BGTC: Tensor, v_BGTC: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store keys and values from position `start` on, and return those that the new tokens see.

        Shapes:  k_BGTC, v_BGTC (B, G, T, C).
        Returns: (k_BGSC, v_BGSC): up to `size` tokens before the new ones, then the new ones, in
                 order; for one new token the last `size`, itself included, in any order, which does
                 not matter to one query.
        """
        new_2BGTC = torch.stack((k_BGTC, v_BGTC))
        if self._kept_2BGSC is None:
            self._kept_2BGSC = new_2BGTC.new_empty(
                *new_2BGTC.shape[:3], self.size, new_2BGTC.shape[4]
            )
        kept_2BGSC, num_new = self._kept_2BGSC, new_2BGTC.shape[3]
        end = start + num_new
        if num_new == 1 or end <= self.size:
            kept_2BGSC.narrow(3, start % self.size, num_new).copy_(new_2BGTC)
            seen_2BGSC = kept_2BGSC[:, :, :, :end]
        else:
            first = self.size - min(start, self.size)
            in_order_2BGSC = kept_2BGSC.roll(-start, dims=3)[:, :, :, first:]
            seen_2BGSC = torch.cat((in_order_2BGSC, new_2BGTC), dim=3)
            kept_2BGSC.copy_(seen_2BGSC[:, :, :, -self.size :].roll(end, dims=3))
        return seen_2BGSC[0], seen_2BGSC[1]
