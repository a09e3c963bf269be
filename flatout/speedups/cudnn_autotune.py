"""Let cuDNN try its algorithms for each shape and keep the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flatout.assembly.parts import Parts
from flatout.assembly.speedup import Off, Speedup, Tolerance, first_of, needs_gpu


@contextmanager
def benchmarking() -> Iterator[None]:
    """Enable cuDNN's benchmark mode. Restore the previous setting afterwards."""
    import torch

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def apply(parts: Parts) -> None:
    """Let cuDNN choose."""
    parts.cudnn_benchmark = benchmarking


SPEEDUP = Speedup(
    name="cudnn-autotune",
    apply=apply,
    saves="time in your own models with convolutions (flatout's models have none and should "
    "gain nothing)",
    tolerance=Tolerance.rounding(rtol=1e-3),
    why_not=first_of(
        needs_gpu("cuDNN"),
        lambda _machine, config: (
            "Its choice may differ between runs, and train.deterministic=true."
            if config.train.deterministic
            else None
        ),
    ),
    rank=950,
    auto={"cuda": Off("flatout's models have no convolutions")},
)
