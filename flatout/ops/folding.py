"""Drive gains and state coupling of an eigenstate network, applied to activations or to weights.

Letters: D width, K eigenstates, E = 2 K: K real parts, then K imaginary parts; H heads of
         resonance, I and J eigenstates of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RESONANCE = 0.01
"""Factor of the coupling between eigenstates."""


class Weights(NamedTuple):
    """The linear maps around a recurrence, in the order in which they are applied."""

    drive: Tensor
    """From the hidden states to the drive (E, D)."""
    bias: Tensor | None
    """Added to the drive (E,)."""
    gains: tuple[Tensor | None, ...]
    """Factor of the drive for each recurrence, (K,) or per token (B, T, K); None is 1."""
    coupling: Tensor | None
    """The share of the others of its head that each eigenstate adds (K, J), in units of RESONANCE;
    None means no coupling.
    """
    output: Tensor
    """From the states back to the hidden states (D, E)."""


def reference(weights: Weights) -> Weights:
    """Return the weights unchanged; the model applies gains and coupling to drive and states.

    Shapes:  as in `Weights`.
    Returns: the same.
    Cost:    none here; the drive and the states, (B, T, E), are read and written once more for each
             of the two, and again in backward.
    """
    return weights


def folded(weights: Weights) -> Weights:
    """Return equivalent weights: gains are part of the drive, the coupling of the output weight.

    Both maps are linear and the same for every token. Recurrences that share one drive keep their
    own gains, as does a recurrence whose eigenvalues depend on the token; the coupling is always
    folded. Gradients reach the parameters through the folded weights.

    Shapes:  as in `Weights`.
    Returns: weights of the same shapes; the coupling is None, and so is a gain that was folded.
    Cost:    2 D E J FLOP and a few passes over two weights, for any number of tokens.
    """
    drive_ED, bias_E, gains, coupling_KJ, output_DE = weights
    if len(gains) == 1 and gains[0] is not None and gains[0].dim() == 1:
        gain_E = torch.cat((gains[0], gains[0])).to(drive_ED.dtype)
        drive_ED, gains = drive_ED * gain_E[:, None], (None,)
        bias_E = None if bias_E is None else bias_E * gain_E
    if coupling_KJ is not None:
        coupling_HJI = _by_head(coupling_KJ, output_DE.dtype)
        output_D2HJ = output_DE.view(output_DE.shape[0], 2, *coupling_HJI.shape[:2])
        added_D2HI = torch.einsum("dghj,hji->dghi", output_D2HJ, coupling_HJI)
        output_DE = output_DE + RESONANCE * added_D2HI.flatten(1)
    return Weights(drive_ED, bias_E, gains, None, output_DE)


def scaled(drive_BTE: Tensor, gain: Tensor | None) -> Tensor:
    """Return the drive times its gain, in the wider of their dtypes; unchanged if the gain is None.

    Shapes:  drive_BTE (B, T, E); gain (K,) or (B, T, K).
    Returns: drive_BTE.
    """
    return drive_BTE if gain is None else drive_BTE * torch.cat((gain, gain), dim=-1)


def coupled(states_BTE: Tensor, coupling_KJ: Tensor | None) -> Tensor:
    """Add to each eigenstate a little of the others of its head; None means no coupling.

    Shapes:  states_BTE (B, T, E); coupling_KJ (K, J), J eigenstates per head.
    Returns: states_BTE.
    Cost:    4 B T K J FLOP.
    """
    if coupling_KJ is None:
        return states_BTE
    coupling_HJI = _by_head(coupling_KJ, states_BTE.dtype)
    states_BT2HI = states_BTE.view(*states_BTE.shape[:-1], 2, *coupling_HJI.shape[:2])
    added_BT2HJ = torch.einsum("btghi,hji->btghj", states_BT2HI, coupling_HJI)
    return states_BTE + RESONANCE * added_BT2HJ.flatten(2)


def _by_head(coupling_KJ: Tensor, dtype: torch.dtype) -> Tensor:
    size = coupling_KJ.shape[1]
    return coupling_KJ.to(dtype).view(-1, size, size)
