"""The recurrence of an eigenstate network by FFT, as public code computes it: a baseline.

Letters: B rows, T tokens, K eigenstates, E = 2 K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.ops import scan
from flatout.ops.scan_solvers import by_products, eigenvalues


def fft(
    log_decay: Tensor,
    angle: Tensor,
    drive_BTE: Tensor,
    *,
    doc_ids_BT: Tensor | None = None,
    start_BE: Tensor | None = None,
    chunk_size: int = 128,
) -> Tensor:
    """Return the states as a convolution, padded to 2 T tokens to prevent wrap-around.

    Documents and selective eigenvalues are no convolution; `scan.chunked` handles them.

    Shapes:  as `flatout.ops.scan.reference`.
    Returns: as `flatout.ops.scan.reference`.
    Cost:    O(B T K log T) FLOP, in complex tensors of 2 T tokens.
    """

    def solve(
        log_decay: Tensor, angle: Tensor, drive_BT2K: Tensor, resets_BT: Tensor | None
    ) -> Tensor:
        if log_decay.dim() > 1 or resets_BT is not None:
            return by_products(log_decay, angle, drive_BT2K, resets_BT, chunk_size=chunk_size)
        tokens = drive_BT2K.shape[1]
        exponents_T1 = torch.arange(tokens, device=angle.device, dtype=torch.float64)[:, None]
        response_T2K = eigenvalues(
            log_decay.double() * exponents_T1, angle.double() * exponents_T1, drive_BT2K.dtype
        )
        drive_BTK, response_TK = (
            torch.complex(*parts.unbind(dim=-2)) for parts in (drive_BT2K, response_T2K)
        )
        spectrum_BTK = torch.fft.fft(drive_BTK, n=2 * tokens, dim=1)
        spectrum_BTK *= torch.fft.fft(response_TK, n=2 * tokens, dim=0)
        states_BTK = torch.fft.ifft(spectrum_BTK, dim=1)[:, :tokens]
        return torch.stack((states_BTK.real, states_BTK.imag), dim=-2)

    return scan._solved(solve, log_decay, angle, drive_BTE, doc_ids_BT, start_BE)
