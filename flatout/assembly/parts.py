"""The parts of a run that speedups replace, each with its plain value.

Nothing here imports torch. A part that needs it is `named`, and imported by `Parts.loaded`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flatout.config.registry import load_reference

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from flatout.data.load.batches import SequenceReader, StepReader
    from flatout.data.load.loader import DirectLoader, PrefetchLoader
    from flatout.data.tokenizers import Tokenizer
    from flatout.distributed.mesh import Mesh
    from flatout.models.language_model import LanguageModel
    from flatout.ops import Ops
    from flatout.optim.groups import AdamWFactory


PLAIN_ROWS, PLAIN_TOKENS = 12, 131_072
"""The usual hand-written micro-batch: nanoGPT's 12 rows, at most the tokens of 4 x 32,768."""
OBJECTS_BETWEEN = 700
"""New objects between two runs of Python's garbage collector, by default."""


@dataclass(frozen=True)
class Precision:
    """Arithmetic of matmuls. Weights, gradients and optimizer state stay in fp32."""

    name: Literal["fp32", "bf16", "fp16"]
    """The value of train.precision in the resolved config."""
    autocast: str | None = None
    """torch dtype of the matmuls. None leaves them in fp32."""
    loss_scale: float | None = None
    """Initial loss scale. None where gradients cannot underflow."""

    def dtype(self) -> torch.dtype | None:
        """Return the torch dtype of the matmuls, or None."""
        import torch

        return getattr(torch, self.autocast) if self.autocast else None

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context for calling a model on `cpu` or `cuda`."""
        import torch

        return torch.autocast(device_type, dtype=self.dtype()) if self.autocast else nullcontext()


FP32 = Precision("fp32")


class Readback(Protocol):
    """Brings metrics from the device to the host."""

    def push(self, step: int, values: Mapping[str, Tensor], *, due: bool) -> None:
        """Take the metrics of a step (name to 0-D tensor). Only those that are `due` are kept.

        Shapes: each value is 0-D.
        """

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the metrics that have reached the host. With `flush`, wait for all of them."""


class ImmediateReadback:
    """Reads the metrics from the device at every step, which makes the device wait for the host."""

    def __init__(self) -> None:
        self._read: list[tuple[int, dict[str, float]]] = []

    def push(self, step: int, values: Mapping[str, Tensor], *, due: bool) -> None:
        """Read the `values` (name to 0-D tensor) of `step`, and keep them only when `due`.

        Shapes: each value is 0-D.
        """
        metrics = {name: float(value) for name, value in values.items()}
        if due:
            self._read.append((step, metrics))

    def ready(self, *, flush: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the metrics since the last call. `flush` has no effect, as nothing is pending."""
        read, self._read = self._read, []
        return read


def rows_people_write(seq_len: int, _device: str) -> int:
    """Return the most rows of a hand-written micro-batch: 12, or 131,072 tokens."""
    return max(min(PLAIN_ROWS, PLAIN_TOKENS // seq_len), 1)


def divisors(number: int, at_most: int) -> Iterator[int]:
    """Yield the divisors of a number up to `at_most`, largest first."""
    yield from (one for one in range(min(number, at_most), 0, -1) if number % one == 0)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set every gradient to None. The next backward pass allocates new ones."""
    for parameter in parameters:
        parameter.grad = None


def zero_in_place(parameters: Iterable[nn.Parameter]) -> None:
    """Set the gradients to zero in place, and allocate missing ones.

    With DDP, gradients stay views of its buckets: it copies a gradient that backward allocated.
    With CUDA graphs, autograd takes the first gradient it finds as the parameter's own, and one
    that a graph wrote would be overwritten by the next micro-batch.
    """
    import torch

    gradients = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device=parameter.device
                )
            gradients.append(parameter.grad)
    if gradients:
        torch._foreach_zero_(gradients)


@contextmanager
def automatic_gc() -> Iterator[Callable[[int], None]]:
    """Leave Python's garbage collector on, and run it at least as often as Python does by default.

    The callback for each step does nothing.
    """
    before = gc.get_threshold()[0]
    gc.set_threshold(min(before, OBJECTS_BETWEEN))
    try:
        yield lambda _step: None
    finally:
        gc.set_threshold(before)


def two_in_fp32(num_weights: int) -> int:
    """Return the bytes of AdamW's two moments for a tensor with this many weights."""
    return 8 * num_weights


def named(reference: str) -> Any:
    """Return the name of a part, `package.module:attribute`, typed as what it names."""
    return reference


@dataclass
class Parts:
    """A value for every part of a run. A speedup's `apply` sets those that it replaces."""

    reader: Callable[[Tokenizer], SequenceReader] = named(
        "flatout.data.load.baseline:TokenisingReader"
    )
    """Makes the reader of a sequence's tokens, given the dataset's tokenizer."""
    batching: Callable[..., StepReader] = named("flatout.data.load.batches:SequenceSteps")
    """Makes the reader of steps from (split, plan, reader). It decides the rows of each."""
    loader: Callable[[StepReader], DirectLoader | PrefetchLoader] = named(
        "flatout.data.load.loader:DirectLoader"
    )
    """Makes the data loader, which moves rows to the device."""
    most_rows: Callable[[int, str], int] = rows_people_write
    """(seq_len, device) -> the most rows of a micro-batch, when batch.rows_per_device is `auto`."""
    matmul: Literal["highest", "high"] = "highest"
    """torch's float32 matmul precision."""
    precision: Precision = FP32
    """Arithmetic of the matmuls."""
    attention: Callable[..., Tensor] = named("flatout.ops.attention:reference")
    """Attention inside the blocks."""
    linear: Callable[..., Tensor] = named("flatout.ops.linear:reference")
    """Matmuls inside the blocks."""
    heads: Callable[..., tuple[Tensor, Tensor, Tensor]] = named("flatout.ops.heads:reference")
    """Splits a projection into query, key and value heads, normalised and rotated."""
    scan: Callable[..., Tensor] = named("flatout.ops.scan:chunked")
    """The linear recurrence of an eigenstate network."""
    cross_entropy: Callable[..., tuple[Tensor, Tensor]] = named("flatout.ops.cross_entropy:fused")
    """The loss. Its plain value is torch's cross-entropy on whole logits, as people write it."""
    newton_schulz: Callable[[Tensor], Tensor] = named("flatout.ops.newton_schulz:batched")
    """Muon's orthogonalisation of a gradient."""
    optimizer: AdamWFactory = named("flatout.optim.adamw:per_parameter")
    """Makes AdamW: the whole optimizer, or the part that Muon leaves to AdamW."""
    moments: Callable[[int], int] = two_in_fp32
    """Returns the bytes of AdamW's moments for a tensor, given its number of weights."""
    activations: Callable[[LanguageModel], object] | None = None
    """Makes the layers of a model keep less for backward. Without it they keep all."""
    compilation: Callable[[LanguageModel, Mesh], object] | None = None
    """Compiles a model, or its layers."""
    zero_grad: Callable[[Iterable[nn.Parameter]], None] = drop_gradients
    """Clears the parameters' gradients after each step."""
    readback: Callable[[], Readback] = ImmediateReadback
    """Makes the readback of metrics from the device."""
    state_saver: Callable[[], Any] = named("flatout.training.checkpoint.savers:Saver")
    """Makes the writer of checkpoints. All ranks call the same methods at the same points."""
    gc: Callable[[], AbstractContextManager[Callable[[int], None]]] = automatic_gc
    """Context of the training loop that yields a callback to call after each step."""
    cudnn_benchmark: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of the training loop in which cuDNN chooses its algorithms."""

    def loaded(self) -> Parts:
        """Return these parts, with those that are named imported."""
        return Parts(**{
            name: load_reference(value) if isinstance(value, str) and ":" in value else value
            for name, value in vars(self).items()
        })  # fmt: skip

    def ops(self) -> Ops:
        """Return the ops that a model is built with."""
        from flatout.ops import Ops

        return Ops(**{each.name: getattr(self, each.name) for each in fields(Ops)})

    def arithmetic(self, device: str) -> str:
        """Return the arithmetic of the matmuls on `device`: fp32, tf32, bf16 or fp16."""
        is_tf32 = self.matmul == "high" and device.startswith("cuda")
        return "tf32" if is_tf32 and self.precision.name == "fp32" else self.precision.name
