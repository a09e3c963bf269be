"""The loss of a language model, from the last hidden states and the output weight.

Letters: B rows, T tokens, N = B T targets, D width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from flatout.errors import ShapeError
from flatout.ops import at_least_fp32, linear

IGNORED = -1
"""The target that counts for nothing."""


def reference(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Summed negative log-likelihood of the targets under softmax(hidden @ weight^T), and how many targets counted.

    A target of -1 is ignored: whatever its hidden state holds, NaN included, reaches neither the loss nor a gradient.
    Whole logits and plain functions are the definition; every variant must match it, gradients included.

    Shapes:  hidden_BTD (B, T, D); weight_VD (V, D); targets_BT (B, T) int64 in [-1, V).
    Returns: (loss_sum, num_valid): scalars, fp32 (fp64 for fp64) and int64. Both are 0 when nothing counts.
    Units:   loss in nats, summed, not averaged.
    Cost:    2 B T D V FLOP forward, twice that backward; logits and their log-softmax (fp32) are kept for backward.
    Raises:  ShapeError when the shapes do not fit.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    logits_BTV = at_least_fp32(functional.linear(hidden_BTD, weight_VD))
    log_probs_BTV = logits_BTV.log_softmax(dim=-1)
    picked_BT = log_probs_BTV.gather(-1, targets_BT.clamp_min(0)[..., None])[..., 0]
    return -picked_BT.masked_fill(~valid_BT, 0.0).sum(), valid_BT.sum()


def fused(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`reference` through torch's own cross_entropy, which gathers and sums in one pass.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `reference`, fewer passes over the logits.
    Raises:  ShapeError as `reference`.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    return _summed(functional.linear(hidden_BTD, weight_VD), targets_BT), valid_BT.sum()


def onednn(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`fused`, with the products of `flatout.ops.linear.onednn`: for fp32 on a CPU.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `fused`.
    Raises:  ShapeError as `reference`.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    return _summed(linear.onednn(hidden_BTD, weight_VD), targets_BT), valid_BT.sum()


def bf16(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`fused`, with the products of `flatout.ops.linear.bf16`: for CPUs that multiply bfloat16.

    Shapes:  as `reference`.
    Returns: as `reference`.
    Cost:    as `fused`.
    Raises:  ShapeError as `reference`.
    """
    hidden_BTD, valid_BT = _valid_only(hidden_BTD, weight_VD, targets_BT)
    return _summed(linear.bf16(hidden_BTD, weight_VD), targets_BT), valid_BT.sum()


def _summed(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    logits_NV = at_least_fp32(logits_BTV).flatten(0, 1)
    return functional.cross_entropy(logits_NV, targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")


def _valid_only(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the hidden states whose target is ignored: 0 x NaN is NaN in the weight's gradient."""
    if hidden_BTD.shape[:-1] != targets_BT.shape or hidden_BTD.shape[-1] != weight_VD.shape[-1]:
        raise ShapeError(
            f"The loss got hidden states {tuple(hidden_BTD.shape)}, weight {tuple(weight_VD.shape)}, targets {tuple(targets_BT.shape)}.",
            fix="Give one target for each hidden state, and a weight as wide as they are.",
        )
    valid_BT = targets_BT != IGNORED
    return hidden_BTD.masked_fill(~valid_BT[..., None], 0.0), valid_BT
