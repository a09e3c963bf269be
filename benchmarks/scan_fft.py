"""The recurrence of an eigenstate network by FFT, as public code computes it: a baseline.

Letters: B rows, T tokens, K eigenstates, E = 2 K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.ops import scan


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

    Documents, selective eigenvalues and a start are no convolution; `scan.chunked` handles them.

    Shapes:  as `flatout.ops.scan.reference`.
    Returns: as `flatout.ops.scan.reference`.
    Cost:    O(B T K log T) FLOP, in complex tensors of 2 T tokens.
    """
    if log_decay.dim() > 1 or doc_ids_BT is not None or start_BE is not None:
        others = {"doc_ids_BT": doc_ids_BT, "start_BE": start_BE, "chunk_size": chunk_size}
        return scan.chunked(log_decay, angle, drive_BTE, **others)  # type: ignore[arg-type]
    with torch.autocast(drive_BTE.device.type, enabled=False):
        drive_BTE = drive_BTE.to(torch.promote_types(drive_BTE.dtype, torch.float32))
        tokens = drive_BTE.shape[1]
        exponents_T1 = torch.arange(tokens, device=angle.device, dtype=torch.float64)[:, None]
        response_TK = torch.polar((log_decay * exponents_T1).exp(), angle * exponents_T1)
        drive_BTK = torch.complex(*drive_BTE.chunk(2, dim=-1))
        spectrum_BTK = torch.fft.fft(drive_BTK, n=2 * tokens, dim=1)
        response_TK = torch.fft.fft(response_TK.to(drive_BTK.dtype), n=2 * tokens, dim=0)
        states_BTK = torch.fft.ifft(spectrum_BTK * response_TK, dim=1)[:, :tokens]
        return torch.cat((states_BTK.real, states_BTK.imag), dim=-1)
