"""Names the class of an operation or kernel: matmul, attention, elementwise, ... No torch."""

from __future__ import annotations

import re
from functools import cache

MEMORY_BOUND = frozenset({"normalisation", "elementwise", "reduction", "copy"})
"""Classes that are limited by memory bandwidth: they do a few operations per byte."""
_PATTERNS = (
    ("communication", r"nccl|gloo|all_?reduce|all_?gather|reduce_?scatter|broadcast_kernel|c10d"),
    (
        "optimizer",
        r"fused_(adam|sgd)|fusedadam|foreach|multi_tensor|optimizer\.step|newton_schulz|"
        r"clip_grad|linalg_vector_norm",
    ),
    ("loss", r"cross_entropy|nll_loss|log_softmax|linear_cross"),
    (
        "attention",
        r"attention|flash|fmha|mem_eff|sdpa|_softmax",
    ),
    ("scan", r"cumsum|cumprod|associative_scan|_scan|fft"),
    ("normalisation", r"(layer|batch|group|rms|instance)_?norm|rsqrt"),
    (
        "matmul",
        r"gemm|cutlass|cublas|nvjet|xmma|wgmma|matmul|addmm|addmv|baddbmm|\bb?mm\b|_linear|"
        r"\blinear\b|convolution|conv\dd|einsum",
    ),
    (
        "copy",
        r"memcpy|memset|copy_|_to_copy|\bto\b|clone|contiguous|\bcat\b|catarray|index|gather|"
        r"scatter|embedding|transpose|slice_backward|\bzeros?_?\b|fill|\bstack\b",
    ),
    ("reduction", r"reduce|\bsum\b|\bmean\b|\bmax\b|\bmin\b|amax|\bnorm\b|argmax|\bvar\b"),
    (
        "elementwise",
        r"elementwise|\badd_?\b|\bsub_?\b|\bmul_?\b|\bdiv_?\b|\bpow\b|\bexp\b|\blog\b|gelu|silu|"
        r"relu|sigmoid|tanh|dropout|where|masked|\bneg\b|sqrt|\bsin\b|\bcos\b|clamp|addcmul|"
        r"addcdiv|lerp|\beq\b|\bne\b|\bge\b|\bgt\b|\ble\b|\blt\b",
    ),
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)
_GENERATED = re.compile(r"^(?:graph_\w*?)?(triton|cpp)_(poi|red|per|mm|tem|for|spl)?_?_?fused_?")
"""How torch.compile names the kernels that it generates, before the operations fused in them."""
_OF_GENERATED = {
    "poi": "elementwise",
    "red": "reduction",
    "per": "reduction",
    "mm": "matmul",
    "tem": "matmul",
    "for": "optimizer",
    "spl": "scan",
}
TELLING = frozenset({"communication", "copy", "attention"})
"""Classes that a kernel's own name decides, whatever operation started it."""


def is_generated(name: str) -> bool:
    """Return whether torch.compile generated the kernel."""
    return _GENERATED.match(name) is not None


@cache
def kind_of(name: str) -> str:
    """Return the class of an operation (`aten::mm`) or a kernel.

    A kernel that torch.compile generated has the class of the rarest operation fused in it:
    loss, attention, scan, normalisation, or else that of its shape.
    """
    word = name.removeprefix("aten::").lower()
    generated = _GENERATED.match(word)
    if generated:
        fused = {kind for kind, pattern in _COMPILED if pattern.search(word.replace("_", " "))}
        fused |= {kind for kind, pattern in _COMPILED[:6] if pattern.search(word)}
        named = next(
            (kind for kind in ("loss", "attention", "scan", "normalisation") if kind in fused), None
        )
        return named or _OF_GENERATED.get(generated[2] or "", "elementwise")
    return next((kind for kind, pattern in _COMPILED if pattern.search(word)), "other")
