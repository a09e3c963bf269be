"""Going on with a text: what a model keeps of the tokens it has read, so that one token more costs
one token's work.

Letters: B rows, T tokens, V vocabulary, G key and value heads, S places for keys, C head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from flatout.errors import ShapeError


class Decoder(ABC):
    """A text that a model reads piece by piece; after each piece it says what comes next.
    `LanguageModel.decoder` makes one.

    What is kept in between is the model's affair: keys and values, a recurrent state of constant
    size, or the tokens alone.
    """

    max_tokens: int | None
    """Most tokens it reads; None is any number."""
    num_tokens: int
    """Tokens of each row that it has read."""

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0

    @final
    def has_room(self, num_tokens: int) -> bool:
        """Say whether it can read so many more."""
        return self.max_tokens is None or self.num_tokens + num_tokens <= self.max_tokens

    @final
    @torch.no_grad()
    def read(self, tokens_BT: Tensor) -> Tensor:
        """Read more of the text, and return the scores of the token that follows: those of a whole
        pass over all that was read.

        Shapes:  tokens_BT (B, T) integers, T at least 1; every call has the same rows.
        Returns: logits_BV.
        Raises:  ShapeError when there is no room for them.
        """
        num_tokens = tokens_BT.shape[1]
        if num_tokens < 1 or not self.has_room(num_tokens):
            raise ShapeError(
                f"{num_tokens} tokens more cannot be read: {self.num_tokens} of {self.max_tokens} are.",
                fix="Give at least one, and begin a new decoder with the last part of the text when it is full.",
            )
        logits_BV = self.scores_after(tokens_BT)
        self.num_tokens += num_tokens
        return logits_BV

    @abstractmethod
    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Read on, and return the scores of what follows; `num_tokens` is still the count of the
        tokens before these.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """


@final
class Recomputing(Decoder):
    """Keeps the tokens and computes them all for each one more: right for every model, at the cost
    of a whole pass a token.
    """

    def __init__(self, next_logits: Callable[[Tensor], Tensor], max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._next_logits = next_logits
        self._read: list[Tensor] = []

    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Return the scores after all tokens, computed from the first on.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        self._read.append(tokens_BT)
        return self._next_logits(torch.cat(self._read, dim=1))


@final
class KeyValueCache:
    """Keys and values of the last `size` tokens of one attention layer, in memory that is taken
    once, at the first use.

    The token at position p lies at place p modulo `size`: until that many have come the places are
    in order, afterwards each new token takes the place of the oldest. Keys are kept as the scores
    need them, turned by their positions.

    Memory: 2 B G size C elements of the keys' dtype. All layers of GPT-2 124M hold 36 MiB a row at
            1,024 tokens in bf16.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept_2BGSC: Tensor | None = None

    def extend(self, k_BGTC: Tensor, v_BGTC: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of the tokens from position `start` on, and return those that
        the new tokens may see.

        Shapes:  k_BGTC, v_BGTC (B, G, T, C).
        Returns: (k_BGSC, v_BGSC): up to `size` tokens before the new ones and they themselves, in
                 order; for one new token the last `size`, itself included, in any order, which one
                 query cannot tell.
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
            in_order_2BGSC = kept_2BGSC.roll(-start, dims=3)[
                :, :, :, self.size - min(start, self.size) :
            ]
            seen_2BGSC = torch.cat((in_order_2BGSC, new_2BGTC), dim=3)
            kept_2BGSC.copy_(seen_2BGSC[:, :, :, -self.size :].roll(end, dims=3))
        return seen_2BGSC[0], seen_2BGSC[1]
