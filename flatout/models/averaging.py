"""Means of several tokens, for a recurrence with coarser steps.

Groups of `scale` tokens start anew at every document; leftover tokens at the end of a document form
no group. A group is available from its last token on.

Letters: B rows, T tokens, N groups that a row has room for, S tokens of a group (the scale), E
         components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from flatout.ops import at_least_fp32


@dataclass(frozen=True)
class Groups:
    """The positions of the groups of packed documents.

    A row has room for T // S groups and is filled from the left: no shape depends on the documents.
    """

    row: Tensor
    """The index of each row (B, 1)."""
    members: Tensor
    """The tokens of each group (B, N, S); arbitrary tokens where there is no group."""
    document: Tensor
    """The document of each group (B, N), counted from 1 in its row; 0 where there is no group."""
    known: Tensor
    """The latest complete group at each token, times S, plus the tokens since (B, T). All tokens
    of a row get different numbers.
    """
    is_known: Tensor
    """Whether there is such a group in the token's own document (B, T)."""

    @classmethod
    def of(cls, doc_ids_BT: Tensor, scale: int) -> Self:
        """Return the groups of `scale` tokens.

        Shapes:  doc_ids_BT (B, T) integers, T >= scale.
        """
        rows, tokens = doc_ids_BT.shape
        device = doc_ids_BT.device
        index_T = torch.arange(tokens, device=device)
        row_B1 = torch.arange(rows, device=device)[:, None]
        starts_BT = functional.pad(doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1], (1, 0), value=True)
        read_BT = index_T - torch.where(starts_BT, index_T, 0).cummax(dim=1).values + 1
        complete_BT = (read_BT % scale == 0).cumsum(dim=1)
        wanted_BN = torch.arange(1, tokens // scale + 1, device=device).repeat(rows, 1)
        last_BN = torch.searchsorted(complete_BT, wanted_BN)
        exists_BN, last_BN = last_BN < tokens, last_BN.clamp(max=tokens - 1)
        return cls(
            row=row_B1,
            members=last_BN[..., None] + torch.arange(1 - scale, 1, device=device),
            document=torch.where(exists_BN, starts_BT.cumsum(dim=1)[row_B1, last_BN], 0),
            known=(complete_BT - 1).clamp(min=0) * scale + read_BT % scale,
            is_known=read_BT >= scale,
        )


def group_means(drive_BTE: Tensor, scale: int, groups: Groups | None) -> Tensor:
    """Return the mean of every group, in at least fp32, and zero for groups that do not exist.

    Shapes:  drive_BTE (B, T, E); groups None where a row is one document, whose groups are
             contiguous from its first token on.
    Returns: means_BNE, N = T // scale.
    """
    drive_BTE = at_least_fp32(drive_BTE)
    if groups is None:
        complete = drive_BTE.shape[1] // scale * scale
        return torch.unflatten(drive_BTE[:, :complete], 1, (-1, scale)).mean(dim=2)
    members_BNSE = drive_BTE[groups.row[..., None], groups.members]
    return torch.where((groups.document > 0)[..., None], members_BNSE.mean(dim=2), 0.0)


def latest_states(states_BNE: Tensor, scale: int, groups: Groups) -> Tensor:
    """Return, for each token, the state of the latest complete group of its document, or zero.

    Shapes:  states_BNE (B, N, E).
    Returns: known_BTE.
    """
    known_BTE = repeated(states_BNE, scale)[groups.row, groups.known]
    return torch.where(groups.is_known[..., None], known_BTE, 0.0)


def repeated(states_BNE: Tensor, scale: int) -> Tensor:
    """Return every state `scale` times in a row.

    Its backward pass sums in a fixed order, unlike that of indexing with repeated indices.

    Shapes:  states_BNE (B, N, E).
    Returns: (B, N * scale, E).
    """
    return states_BNE[:, :, None].expand(-1, -1, scale, -1).flatten(1, 2)
