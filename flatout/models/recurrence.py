"""The recurrence of an eigenstate network: drive, memories, coupling, and a gated output.

Letters: B rows, T tokens, N groups of S tokens, D width, K eigenstates, E = 2 K; H heads of
         resonance, I and J eigenstates of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.models.layers import Factor, Linear
from flatout.ops import Ops, at_least_fp32

AUTO_CHUNK = {"cpu": 32, "cuda": 128}
"""Tokens per chunk by device: products of small matrices are slow on a GPU, and large ones are more
work on a CPU.
"""
RESONANCE = 0.01
"""Factor of the coupling between eigenstates."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of this fraction of a circle stay apart from each other and from zero, however many
there are.
"""


@dataclass
class MemoryState:
    """The state of one memory between two pieces of a document."""

    last: Tensor | None = None
    """The last state (B, E); None before the first."""
    pending: Tensor | None = None
    """Drive (B, T, E) of the tokens that do not yet fill a group of `scale`."""


class Recurrence(nn.Module):
    """Drive, eigenstates, resonance, and back to the model's width through a gate."""

    def __init__(
        self,
        *,
        width: int,
        num_eigenstates: int,
        num_heads: int,
        scales: tuple[int, ...],
        eigenvalues: Literal["fixed", "selective"],
        chunk_size: int | Literal["auto"],
        bias: bool,
        ops: Ops,
    ) -> None:
        super().__init__()
        linear, factor = partial(Linear, ops=ops), partial(Factor, ops=ops)
        self.ops = ops
        self.drive = factor(width, 2 * num_eigenstates, bias=bias)
        self.gate = linear(width, width, bias=True)
        self.output = factor(2 * num_eigenstates, width, bias=bias)
        self.selection = (
            linear(width, num_eigenstates, bias=True) if eigenvalues == "selective" else None
        )
        self.memories = nn.ModuleList(
            Memory(num_eigenstates, scale, chunk_size, ops) for scale in scales
        )
        self.share = nn.Parameter(torch.zeros(len(scales))) if len(scales) > 1 else None
        self.coupling = nn.Parameter(torch.zeros(num_eigenstates, num_eigenstates // num_heads))

    def forward(self, hidden_BTD: Tensor, doc_ids_BT: Tensor | None) -> Tensor:
        """Return the output for each token, computed from the tokens up to it.

        Shapes:  hidden_BTD (B, T, D); doc_ids_BT (B, T) integers.
        Returns: hidden_BTD.
        """
        return self._output(
            hidden_BTD, [partial(memory, doc_ids_BT=doc_ids_BT) for memory in self.memories]
        )

    def decode(self, hidden_BTD: Tensor, states: list[MemoryState], start: int) -> Tensor:
        """Return the output for the next tokens of a document, and update the states.

        Shapes:  hidden_BTD (B, T, D), at the positions from `start` on.
        Returns: hidden_BTD.
        """
        memories = zip(self._memories(), states, strict=True)
        return self._output(
            hidden_BTD,
            [partial(memory.decode, carried=state, start=start) for memory, state in memories],
        )

    def _memories(self) -> Iterable[Memory]:
        return self.memories  # type: ignore[return-value]

    def _output(self, hidden_BTD: Tensor, calls: list[Callable[..., Tensor]]) -> Tensor:
        """Return the output, computed from the states that the call for each memory returns.

        The pace of a selective recurrence multiplies its decay rate by a factor from 0 to 2.
        """
        pace_BTK = (
            None
            if self.selection is None
            else 2 * at_least_fp32(self.selection(hidden_BTD)).sigmoid()
        )
        eigenvalues = [memory.eigenvalues(pace_BTK) for memory in self._memories()]
        drive_BTE = self.ops.linear(hidden_BTD, self.drive.weight, self.drive.bias)
        states = [call(drive_BTE, each) for call, each in zip(calls, eigenvalues, strict=True)]
        states_BTE = (
            states[0]
            if self.share is None
            else (torch.stack(states) * self.share.softmax(dim=0)[:, None, None, None]).sum(dim=0)
        )
        states_BTE = self._coupled(states_BTE)
        if states_BTE.dtype.itemsize > hidden_BTD.dtype.itemsize:
            states_BTE = states_BTE.to(hidden_BTD.dtype)
        gate_BTD: Tensor = self.gate(hidden_BTD).sigmoid()
        return gate_BTD * self.ops.linear(states_BTE, self.output.weight, self.output.bias)

    def _coupled(self, states_BTE: Tensor) -> Tensor:
        """Add to each eigenstate a little of the others of its head.

        Cost: 4 B T K J FLOP for J eigenstates per head.
        """
        size = self.coupling.shape[1]
        coupling_HJI = self.coupling.to(states_BTE.dtype).view(-1, size, size)
        states_BT2HI = states_BTE.view(*states_BTE.shape[:-1], 2, *coupling_HJI.shape[:2])
        added_BT2HJ = torch.einsum("btghi,hji->btghj", states_BT2HI, coupling_HJI)
        return states_BTE + RESONANCE * added_BT2HJ.flatten(2)


class Memory(nn.Module):
    """Eigenstates that are driven by the means of every `scale` tokens."""

    def __init__(
        self, num_eigenstates: int, scale: int, chunk_size: int | Literal["auto"], ops: Ops
    ) -> None:
        super().__init__()
        self.scale = scale
        self.chunk_size = chunk_size
        self.ops = ops
        self.log_rate = nn.Parameter(torch.zeros(num_eigenstates))
        """Logarithm of the decay rate per step: |eigenvalue| = exp(-exp(log_rate)), below 1 for any
        learned value.
        """
        self.detuning = nn.Parameter(torch.zeros(num_eigenstates))
        """Angle relative to the eigenstate's initial angle, in units of the decay rate: see
        `eigenvalues`.
        """

    @torch.no_grad()
    def init_eigenvalues(
        self, initialisation: Literal["long-memory", "published"], memory: int | None
    ) -> None:
        """Draw time constants log-uniformly up to `memory` tokens, or as published, all short."""
        if initialisation == "published":
            magnitude = torch.empty_like(self.log_rate).uniform_(-3, 0).sigmoid_()
            self.log_rate.copy_(magnitude.log_().neg_().log_())
        else:
            self.log_rate.uniform_(-math.log(max((memory or 2) / self.scale, 2.0)), 0.0)
        self.detuning.zero_()

    def forward(
        self,
        drive_BTE: Tensor,
        eigenvalues: tuple[Tensor, Tensor],
        doc_ids_BT: Tensor | None,
    ) -> Tensor:
        """Return the latest state that each token may read.

        Shapes:  drive_BTE (B, T, E); eigenvalues as `eigenvalues` returns them; doc_ids_BT (B, T)
                 integers.
        Returns: states_BTE, in the dtype of `ops.scan`.
        """
        tokens = drive_BTE.shape[1]
        if self.scale == 1 or doc_ids_BT is None:
            drive_BNE = _scaled(self._means(drive_BTE), eigenvalues)
            states_BNE = self._states(drive_BNE, eigenvalues, doc_ids_BT, None)
            return self._by_token(states_BNE, None, 0, tokens)
        if tokens < self.scale:
            return at_least_fp32(torch.zeros_like(drive_BTE))
        groups = Groups.of(doc_ids_BT, self.scale)
        drive_BNE = _scaled(group_means(drive_BTE, self.scale, groups), eigenvalues)
        states_BNE = self._states(drive_BNE, eigenvalues, groups.document, None)
        return latest_states(states_BNE, self.scale, groups)

    def decode(
        self,
        drive_BTE: Tensor,
        eigenvalues: tuple[Tensor, Tensor],
        carried: MemoryState,
        start: int,
    ) -> Tensor:
        """Return the states for the next tokens of a document, and update `carried`.

        Shapes:  drive_BTE (B, T, E), at the positions from `start` on; eigenvalues as in `forward`.
        Returns: states_BTE, in at least fp32.
        """
        tokens = drive_BTE.shape[1]
        if carried.pending is not None:
            drive_BTE = torch.cat((carried.pending, drive_BTE), dim=1)
        drive_BNE = _scaled(at_least_fp32(self._means(drive_BTE)), eigenvalues)
        states_BNE = self._states(drive_BNE, eigenvalues, None, carried.last)
        states_BTE = self._by_token(states_BNE, carried.last, start, tokens)
        if self.scale > 1:
            carried.pending = drive_BTE[:, drive_BTE.shape[1] // self.scale * self.scale :]
        if states_BNE.shape[1]:
            carried.last = states_BNE[:, -1]
        return states_BTE

    def eigenvalues(self, pace_BTK: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logarithms of magnitudes, and angles.

        The initial angles are spread over the whole circle; learned angles are relative to them, in
        units of the decay rate. If angles were learned in radians, one optimizer step would rotate
        old states by whole circles. An angle near zero would accumulate what all tokens have in
        common, and drown what distinguishes them.

        Shapes:  pace_BTK (B, T, K), None is 1.
        Returns: (log_decay, angle), both (K,), or (B, T, K) with a pace.
        """
        rate_K = at_least_fp32(self.log_rate).exp()
        index_K = torch.arange(1, len(rate_K) + 1, device=rate_K.device, dtype=torch.float64)
        initial_K = (2 * math.pi * (index_K * GOLDEN).frac()).to(rate_K.dtype)
        angle_K = initial_K + rate_K * self.detuning
        if pace_BTK is None:
            return -rate_K, angle_K
        return -rate_K * pace_BTK, angle_K.expand_as(pace_BTK)

    def _means(self, drive_BTE: Tensor) -> Tensor:
        """Return the mean of every complete group of one document."""
        return drive_BTE if self.scale == 1 else group_means(drive_BTE, self.scale, None)

    def _states(
        self,
        drive_BNE: Tensor,
        eigenvalues: tuple[Tensor, Tensor],
        doc_ids_BN: Tensor | None,
        start_BE: Tensor | None,
    ) -> Tensor:
        if not drive_BNE.shape[1]:
            return at_least_fp32(drive_BNE)
        chunk_size = (
            AUTO_CHUNK.get(drive_BNE.device.type, AUTO_CHUNK["cuda"])
            if self.chunk_size == "auto"
            else self.chunk_size
        )
        return self.ops.scan(
            *eigenvalues, drive_BNE, doc_ids_BT=doc_ids_BN, start_BE=start_BE, chunk_size=chunk_size
        )

    def _by_token(
        self, states_BNE: Tensor, before_BE: Tensor | None, start: int, tokens: int
    ) -> Tensor:
        """Return, for each token from `start` on, the state of the latest complete group.

        Before the first group it is `before_BE`, or zero.
        """
        if self.scale == 1:
            return states_BNE
        if before_BE is None:
            before_BE = states_BNE.new_zeros(states_BNE.shape[0], states_BNE.shape[2])
        known_BUE = repeated(torch.cat((before_BE[:, None], states_BNE), dim=1), self.scale)
        return known_BUE[:, start % self.scale + 1 :][:, :tokens]


def _scaled(drive_BNE: Tensor, eigenvalues: tuple[Tensor, Tensor]) -> Tensor:
    """Return the drive times a gain for which states keep the variance of the drive."""
    gain = (-torch.expm1(2 * eigenvalues[0])).sqrt()
    return drive_BNE * torch.cat((gain, gain), dim=-1)


@dataclass(frozen=True)
class Groups:
    """The positions of the groups of packed documents, for a recurrence with coarser steps.

    A group is `scale` (S) tokens. Groups start anew at every document; leftover tokens at the end
    of a document form no group. A group is available from its last token on.

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
