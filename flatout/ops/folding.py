"""Where an eigenstate network applies the gain of its drive and the coupling of its states: to the
activations, or to the weights beside them.

Letters: D width, K eigenstates, E = 2 K: K real parts, then K imaginary ones; H heads of resonance,
         I and J eigenstates of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RESONANCE = 0.01
"""What the coupling of eigenstates counts."""


class Weights(NamedTuple):
    """The linear maps around a recurrence, in the order in which they are applied."""

    drive: Tensor
    """From the hidden states to the drive (E, D)."""
    bias: Tensor | None
    """Added to the drive (E,)."""
    gains: tuple[Tensor | None, ...]
    """What each recurrence multiplies its drive by, (K,) or one for each token (B, T, K); None is
    1.
    """
    coupling: Tensor | None
    """What each eigenstate takes from the others of its head (K, J), in units of RESONANCE; None is
    nothing.
    """
    output: Tensor
    """From the states back to the hidden states (D, E)."""


def reference(weights: Weights) -> Weights:
    """Return the maps as they are: the model applies the gains to the drive and the coupling to the
    states.

    Shapes:  as in `Weights`.
    Returns: the same.
    Cost:    none here; the drive and the states, (B, T, E), are read and written once more for each
             of the two, and again backward.
    """
    return weights


def folded(weights: Weights) -> Weights:
    """Return maps that give the same, with the coupling in the output weight and the gain in the
    drive's weight and bias.

    Both maps are linear and the same for every token. Recurrences that share one drive keep their
    own gains, and so does a recurrence whose eigenvalues depend on the token; the coupling is
    always folded. The gradients reach the parameters through the folded weights.

    Shapes:  as in `Weights`.
    Returns: weights of the same shapes; the coupling is None, and so is a gain that was folded.
    Cost:    2 D E J FLOP and a few passes over two weights, whatever the number of tokens.
    """
    drive_ED, bias_E, gains, coupling_KJ, output_DE = weights
    if len(gains) == 1 and gains[0] is not None and gains[0].dim() == 1:
        gain_E = torch.cat((gains[0], gains[0])).to(drive_ED.dtype)
        drive_ED, bias_E, gains = (
            drive_ED * gain_E[:, None],
            None if bias_E is None else bias_E * gain_E,
            (None,),
        )
    if coupling_KJ is not None:
        coupling_HJI = coupling_KJ.to(output_DE.dtype).view(
            -1, coupling_KJ.shape[1], coupling_KJ.shape[1]
        )
        output_D2HJ = output_DE.view(output_DE.shape[0], 2, *coupling_HJI.shape[:2])
        output_DE = output_DE + RESONANCE * torch.einsum(
            "dghj,hji->dghi", output_D2HJ, coupling_HJI
        ).flatten(1)
    return Weights(drive_ED, bias_E, gains, None, output_DE)


def scaled(drive_BTE: Tensor, gain: Tensor | None) -> Tensor:
    """Return the drive times its gain, in the wider of their types; as it is where the gain is
    None.

    Shapes:  drive_BTE (B, T, E); gain (K,) or (B, T, K).
    Returns: drive_BTE.
    """
    return drive_BTE if gain is None else drive_BTE * torch.cat((gain, gain), dim=-1)


def coupled(states_BTE: Tensor, coupling_KJ: Tensor | None) -> Tensor:
    """Return each eigenstate with a little of the others of its head; as they are where the
    coupling is None.

    Shapes:  states_BTE (B, T, E); coupling_KJ (K, J), J eigenstates a head.
    Returns: states_BTE.
    Cost:    4 B T K J FLOP.
    """
    if coupling_KJ is None:
        return states_BTE
    coupling_HJI = coupling_KJ.to(states_BTE.dtype).view(
        -1, coupling_KJ.shape[1], coupling_KJ.shape[1]
    )
    states_BTGHI = states_BTE.view(*states_BTE.shape[:-1], 2, *coupling_HJI.shape[:2])
    return states_BTE + RESONANCE * torch.einsum(
        "btghi,hji->btghj", states_BTGHI, coupling_HJI
    ).flatten(2)
