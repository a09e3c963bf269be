"""Compute the loss in parts, with a Triton kernel that overwrites logits with their gradients."""

from __future__ import annotations

from functools import partial

from flatout.assembly.conditions import without_triton
from flatout.assembly.recipe import Off, Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="triton-ce",
    fills={"ops.cross_entropy": lazy("flatout.ops.cross_entropy:triton")},
    saves="time and memory: logits are read once and overwritten with their gradients; the "
    "weight's gradient is summed in fp32",
    promise=Promise.rounding(rtol=1e-4),
    why_not=partial(without_triton, capability=(7, 0), instead="chunked-ce", what="Triton"),
    predicted=(
        "2.5% (3 ms of 120 ms) against chunked-ce, between 0.5 and 5.5 ms: GPT-2 124M, 65,536 "
        "tokens of 50,304 logits on one H200. Logits to gradients: 3.3e9 x 2 bytes read and "
        "written once are 13.2 GB, 3.1 ms at 4.3 TB/s; the code that torch compiles reads each row "
        "three times, 4 to 6 ms depending on whether the cache holds the rows: 0.5 to 3 ms. Weight "
        "gradient, 50,304 x 768: no bf16 product written, read and added separately for each of 8 "
        "chunks (8 x 386 MB, 0.7 ms), but 4 passes inside the products (4 x 309 MB, mostly "
        "hidden): 0 to 0.5 ms. Four chunks of 16,384 targets, not eight of 8,192: the hidden "
        "states' gradient fills 2.9 rounds of 132 multiprocessors in 3, not 1.5 in 2, with tiles "
        "of 128 x 256; its 5.1 TFLOP at 790 TFLOP/s take 6.6, not 8.5 ms: 0 to 2 ms, since cuBLAS "
        "may split such products already."
    ),
    rank=620,
    auto={"cuda": Off("chunked-ce is the default; name triton-ce to replace it")},
)
