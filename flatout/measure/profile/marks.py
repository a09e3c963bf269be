"""Marks the phases of a run's steps: data, forward, backward, optimizer, logging.

The marks surround what the training step calls, so that the step itself stays as it is: its feed,
its model, its micro-batches and the end of its update. Phases follow each other without gaps. While
`recording` is set they are ranges in the profiler's trace, and the addresses of inputs and
gradients are kept, by which the memory of a step is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from flatout.assembly.run import Run
from flatout.data.load.feed import PrefetchFeed, StepBatch
from flatout.measure.profile.events import PREFIX, STEP
from flatout.training.metrics.phases import PhaseTimer

Blocks = dict[int, int]
"""Bytes by address."""


class Marks:
    """The phases of a run; `attach` installs it."""

    def __init__(self, run: Run) -> None:
        self.timer = PhaseTimer()
        """Times the host by phase, with or without a profiler."""
        self.recording = False
        """Whether phases are ranges of a trace."""
        self.inputs: list[Blocks] = []
        """Memory of the inputs of each forward pass."""
        self.gradients: list[Blocks] = []
        """Memory of the gradients at the end of each step's backward passes."""
        self._run = run
        self._range: Any = None
        self._step: Any = None

    def start_step(self, number: int) -> None:
        """Start a step with the phase `data`."""
        if self.recording:
            self._step = record_function(f"{PREFIX}{STEP} {number}")
            self._step.__enter__()
        self.switch("data")

    def end_step(self) -> None:
        """End the step, if there is one."""
        self.switch(None)
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def switch(self, phase: str | None) -> None:
        """End the current phase and start another; None starts none."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self.timer.current is not None:
            self.timer.leave()
        if phase is None:
            return
        self.timer.enter(phase)
        if self.recording:
            self._range = record_function(PREFIX + phase)
            self._range.__enter__()

    def attach(self) -> None:
        """Mark the phases of all later steps of the run."""
        run = self._run
        model, grad_sync, zero_grad = run.model, run.recipe.grad_sync, run.recipe.zero_grad

        @contextmanager
        def marked_micro_batch(_model: nn.Module, is_last: bool) -> Iterator[None]:
            with grad_sync(model, is_last):
                yield
            if is_last:
                self._keep_gradients()
                self.switch("optimizer")

        def marked_zero_grad(parameters: Iterable[nn.Parameter]) -> None:
            zero_grad(parameters)
            self.switch("logging")

        run.feed = cast(PrefetchFeed, MarkedFeed(run.feed, self))
        run.model = cast(nn.Module, MarkedModel(model, self))
        run.recipe = run.recipe.with_parts(grad_sync=marked_micro_batch, zero_grad=marked_zero_grad)

    def keep_inputs(self, tensors: Iterable[Any]) -> None:
        """Keep the addresses of a forward pass's inputs."""
        if self.recording:
            self.inputs.append(blocks(one for one in tensors if isinstance(one, Tensor)))

    def _keep_gradients(self) -> None:
        if self.recording:
            found = (weight.grad for weight in self._run.core.parameters())
            self.gradients.append(blocks(one for one in found if one is not None))


class MarkedFeed:
    """A run's feed; when it has returned a batch, the phase `data` is over."""

    def __init__(self, feed: Any, marks: Marks) -> None:
        self._feed, self._marks = feed, marks

    def __next__(self) -> StepBatch:
        batch = cast(StepBatch, next(self._feed))
        self._marks.switch("forward")
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)


class MarkedModel:
    """A run's model; `forward` ends with its call, and `backward` follows."""

    def __init__(self, model: nn.Module, marks: Marks) -> None:
        self._model, self._marks = model, marks

    def __call__(self, *inputs: Any) -> Any:
        """Return the model's result."""
        if self._marks.timer.current != "forward":
            self._marks.switch("forward")
        self._marks.keep_inputs(inputs)
        result = self._model(*inputs)
        self._marks.switch("backward")
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def blocks(tensors: Iterable[Tensor]) -> Blocks:
    """Return the bytes of the memory of tensors by address; views of one block count once.

    Shapes: any.
    """
    found: Blocks = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found
