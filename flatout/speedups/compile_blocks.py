"""torch.compile by block: blocks of one shape share a graph, so a deep model compiles as fast."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import Off, Speedup, Tolerance, without_compiler

OFF = Off(
    "compile fuses more: use compile-blocks where compiling a deep model takes too long",
    from_minutes=2,
)


def apply(parts: Parts) -> None:
    """Compile by layer."""
    parts.compilation = named("flatout.assembly.compiling:compile_layers")


SPEEDUP = Speedup(
    name="compile-blocks",
    apply=apply,
    saves="time, as compile but without fusion across blocks, and compiling 48 blocks takes as "
    "long as compiling one",
    tolerance=Tolerance.rounding(rtol=1e-3),
    compiles=True,
    why_not=without_compiler,
    rank=940,
    auto={"cpu": OFF, "cuda": OFF},
)
