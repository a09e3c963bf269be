"""Context parallelism: the ranks of a group share the tokens of each row.

Every rank is given whole rows, computes its own tokens, and returns the loss of these alone.
Attention gathers the keys and values of all tokens. A recurrence gathers the last state of each
rank, a number of bytes that does not depend on the length.

Letters: B rows, T tokens of this rank, S tokens of the row, G key and value heads, C head size,
         R ranks, K eigenstates, E = 2 K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flatout.errors import ConfigError

ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""The names from torch 2.13 on, and those before."""
MASKED = 2**25
"""The most elements of a mask: 64 MB in bf16."""


@dataclass(frozen=True)
class Context:
    """The part of each row that this rank computes."""

    group: Any
    """The process group whose ranks share a row."""
    rank: int
    size: int
    is_balanced: bool
    """Whether a rank has one part from the start and one from the end of a row, because later
    tokens of causal attention see more keys. A recurrence needs consecutive tokens.
    """

    def spans(self, num_tokens: int, rank: int | None = None) -> list[tuple[int, int]]:
        """Return start and end of a rank's parts of a row of `num_tokens`: this one's by default.

        Raises: ConfigError when the row cannot be divided.
        """
        count = 2 * self.size if self.is_balanced else self.size
        if num_tokens % count:
            raise ConfigError(
                f"A row of {num_tokens} tokens cannot be divided into the {count} parts of "
                f"parallel.context={self.size}.",
                fix=f"Set data.seq_len to a multiple of {count}.",
            )
        length = num_tokens // count
        rank = self.rank if rank is None else rank
        parts = [rank, count - 1 - rank] if self.is_balanced else [rank]
        return [(part * length, (part + 1) * length) for part in parts]

    def own(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a tensor with those of whole rows.

        Shapes:  any, S in `dim`; returns T in its place.
        """
        spans = self.spans(whole.shape[dim])
        return torch.cat([whole.narrow(dim, start, end - start) for start, end in spans], dim)

    def gathered(self, own: Tensor, dim: int) -> Tensor:
        """Return the tokens of all ranks, in the order of the row.

        Shapes:  any, T in `dim`; returns S in its place.
        Cost:    all-gathers (R - 1) times the bytes of `own` per rank; backward reduce-scatters as
                 many.
        """
        every = self.of_ranks(own)
        num_tokens, parts = own.shape[dim] * self.size, dict[int, Tensor]()
        for rank, each in enumerate(every.unbind()):
            done = 0
            for start, end in self.spans(num_tokens, rank):
                parts[start] = each.narrow(dim, done, end - start)
                done += end - start
        return torch.cat([parts[start] for start in sorted(parts)], dim)

    def of_ranks(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one shape, stacked. Gradients return to their ranks.

        Shapes:  any; returns (R, ...).
        """
        gathered: Tensor = Gather.apply(own, self.group, self.size)  # type: ignore[no-untyped-call]
        return gathered

    def attend(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return an attention, as `flatout.ops.attention.reference`, over the tokens of all ranks.

        It takes the queries, keys and values of this rank's tokens, and the documents of whole
        rows. Queries that are later than the first key need a mask, which is made for some of them
        at a time, and again in the backward pass.
        """

        def attention(
            q_BHTC: Tensor,
            k_BGTC: Tensor,
            v_BGTC: Tensor,
            *,
            doc_ids_BS: Tensor | None = None,
            window: int | None = None,
            mask: object = None,
        ) -> Tensor:
            k_BGSC, v_BGSC = self.gathered(torch.stack((k_BGTC, v_BGTC)), 3)
            pieces, outputs = [], []
            is_masked = not q_BHTC.is_cuda or doc_ids_BS is not None or window is not None
            for start, end in self.spans(k_BGSC.shape[2]):
                count = max(MASKED // end, 1) if is_masked else end - start
                pieces += [(at, min(at + count, end)) for at in range(start, end, count)]
            lengths = [end - start for start, end in pieces]
            for (start, end), queries in zip(pieces, torch.split(q_BHTC, lengths, 2), strict=True):
                first = 0 if window is None else max(start - window + 1, 0)
                attend = partial(
                    plain,
                    doc_ids_BS=None if doc_ids_BS is None else doc_ids_BS[:, first:end],
                    window=window,
                )
                keys, values = k_BGSC[:, :, first:end], v_BGSC[:, :, first:end]
                outputs.append(
                    checkpoint(
                        *(attend, queries, keys, values),
                        use_reentrant=False,
                        preserve_rng_state=False,
                    )
                    if first < start and is_masked
                    else attend(queries, keys, values)
                )
            return torch.cat(outputs, dim=2)

        return attention

    def carried(
        self,
        last_BE: Tensor,
        log_decay_K: Tensor,
        angle_K: Tensor,
        num_tokens: int,
        doc_ids_BS: Tensor | None,
    ) -> Tensor:
        """Return what the state that the ranks before leave adds to each of this rank's states.

        `last_BE` is the last of this rank's states, computed from zero. A state ends at the first
        token of a document.

        Shapes:  last_BE (B, E); log_decay_K, angle_K (K,); doc_ids_BS (B, S) integers.
        Returns: added_BTE.
        Cost:    gathers B E numbers per rank.
        """
        steps_T1 = torch.arange(1, num_tokens + 1, device=last_BE.device)[:, None]
        # exact for a long row: an angle grows with the step
        log_TK, turned_TK = steps_T1 * log_decay_K.double(), steps_T1 * angle_K.double()
        wide = torch.complex128 if last_BE.dtype == torch.float64 else torch.complex64
        factor_TK = torch.polar(log_TK.exp(), turned_TK).to(wide)
        last_BK = torch.complex(*last_BE.chunk(2, dim=-1))
        last_RBK = torch.view_as_complex(self.of_ranks(torch.view_as_real(last_BK)))
        whole_RBK = factor_TK[-1].expand(self.size, 1, -1)
        goes_on_BT1 = None
        if doc_ids_BS is not None:
            starts_BS = torch.nn.functional.pad(doc_ids_BS[:, 1:] != doc_ids_BS[:, :-1], (1, 0))
            starts_BRT = torch.unflatten(starts_BS, 1, (self.size, -1))
            lives_BRT = starts_BRT.cumsum(2) == 0
            whole_RBK = whole_RBK * lives_BRT[:, :, -1].T[:, :, None]
            goes_on_BT1 = lives_BRT[:, self.rank, :, None]
        state_BK = torch.zeros_like(last_BK)
        for rank in range(self.size):  # all are used: each takes part in every backward pass
            is_before = rank < self.rank
            left_BK = whole_RBK[rank] * is_before + (not is_before)
            state_BK = state_BK * left_BK + last_RBK[rank] * is_before
        added_BTK = factor_TK * state_BK[:, None]
        if goes_on_BT1 is not None:
            added_BTK = added_BTK * goes_on_BT1
        return torch.cat((added_BTK.real, added_BTK.imag), dim=-1)


def _every(own: Tensor, group: Any, size: int) -> Tensor:
    every = own.new_empty((size, *own.shape))
    ALL_GATHER(every.flatten(0, 1), own.contiguous(), group=group)
    return every


def _share(stacked: Tensor, group: Any) -> Tensor:
    own = torch.empty_like(stacked[0])
    REDUCE_SCATTER(own, stacked.contiguous().flatten(0, 1), group=group)
    return own


class Gather(torch.autograd.Function):
    """The tensors of all ranks. The gradient of a rank's tensor is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, size: int) -> Tensor:
        """Return the tensors, stacked by rank."""
        ctx.group = group
        return _every(own, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's tensor."""
        return _share(grad, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """This rank's slice of the sum of stacked tensors over the ranks."""

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, group: Any) -> Tensor:
        """Return the slice."""
        ctx.group, ctx.size = group, len(stacked)
        return _share(stacked, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all slices."""
        return _every(grad, ctx.group, ctx.size), None
