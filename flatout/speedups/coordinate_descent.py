"""Let Inductor tune block sizes and warps around its own choice for each kernel.

The option is passed to the compiler with the model, so nothing else in the process is tuned:
neither what is compiled inside an operation that the compiler does not trace, such as the chunks of
`chunked-ce`, nor Muon's iterations. (Set for the process, it would not reach the backward pass:
since torch 2.13 a setting holds in one thread, and on a GPU backward is compiled in another.)
`coordinate_descent_check_all_directions` stays off: it tries every combination of neighbours, 3 to
the power of 3 or 4, after the descent has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.assembly.conditions import uses_gpu
from flatout.assembly.recipe import Off, Promise, Speedup, Transform
from flatout.config.schema import RunConfig
from flatout.hardware import Machine

if TYPE_CHECKING:
    from flatout.models.language_model import LanguageModel
    from flatout.parallel.mesh import Mesh

OPTION = "coordinate_descent_tuning"


def _tuned(model: LanguageModel, _mesh: Mesh | None) -> LanguageModel:
    """Set the compiler option, if this torch still has it."""
    import torch

    if OPTION in torch._inductor.list_options():
        model.compiler_options = {**model.compiler_options, OPTION: True}
    return model


def _why_not(machine: Machine, config: RunConfig) -> str | None:
    if not uses_gpu(machine, config):
        return "It tunes Triton kernels, and on a CPU the compiler generates C++."
    if config.train.deterministic:
        return "Its choice may differ between runs, and train.deterministic=true."
    return None


SPEEDUP = Speedup(
    name="coordinate-descent",
    transform=Transform("compiler-options", _tuned),
    saves="time: fused elementwise operations and reductions come closer to the memory "
    "bandwidth, after minutes of tuning at the first start",
    promise=Promise.rounding(rtol=1e-3),
    needs=("compile",),
    compiles=True,
    why_not=_why_not,
    predicted=(
        "1.5% at GPT-2 124M, 3% for an eigenstate network of width 1,024. GPT-2: a step of 65,536 "
        "tokens takes 120 ms; fused kernels move about 140 bytes x d per token and layer, 85 GB in "
        "all, 20 ms at 4.3 TB/s. If their first block sizes reach 85% of that rate and tuned ones "
        "92%, 23.1 ms become 21.4. The eigenstate network spends about 43% of a step outside "
        "products: 0.43 x (1 - 85/92)."
    ),
    rank=930,
    auto={
        "cuda": Off(
            "it tunes kernels for minutes at the first start; use it for runs of hours",
            from_minutes=60,
        ),
    },
)
