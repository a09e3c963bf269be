"""torch.compile: run the model's forward and backward as generated, fused kernels."""

from flatout.assembly.parts import Parts, named
from flatout.assembly.speedup import On, Speedup, Tolerance, without_compiler


def apply(parts: Parts) -> None:
    """Compile the model as a whole, or by layer if it is deep or wrapped."""
    parts.compilation = named("flatout.assembly.compiling:compile_model")


SPEEDUP = Speedup(
    name="compile",
    apply=apply,
    saves="time: elementwise operations are fused, and the model runs without Python's "
    "overhead; with several processes, or more than 6 blocks on a CPU and 16 on a GPU, each block "
    "is compiled separately",
    tolerance=Tolerance.rounding(rtol=1e-3),
    compiles=True,
    why_not=without_compiler,
    rank=910,
    auto={
        "cpu": On(beside="bf16-products", from_minutes=1, measured=True),
        "cuda": On(from_minutes=2),
    },
)
