"""`flatout.watch`: the verdict of `flatout diagnose` about any PyTorch loop.

    watch = flatout.watch(model=model)
    for batch in watch(loader):
        with watch.step():
            loss = model(batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(watch.verdict())

Nothing here may break the loop. An error in here is logged, and the loop continues unwatched.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Generic, Self, TypeVar

import torch

from flatout.config.signature import Option, checked
from flatout.display import html
from flatout.errors import ConfigError
from flatout.measure.attach.follower import Follower
from flatout.measure.attach.guard import LOG
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.evidence import PHASES, Evidence
from flatout.progress import counted

Batch = TypeVar("Batch")
LATEST = list["Watch"]()
"""The watch whose hooks are in torch."""


@checked
def watch(
    *,
    model: Annotated[torch.nn.Module | None, Option("The model that is trained.")] = None,
    steps: Annotated[int | None, Option("Planned length of the loop.", min=1)] = None,
    tokens_per_step: Annotated[int | None, Option("Tokens of a step.", min=1)] = None,
    recorded_steps: Annotated[int, Option("Steps under torch.profiler.", min=0)] = 2,
) -> Watch:
    """Return a watch over a PyTorch training loop, which shows at the end where its time goes.

    `model` is only read: its size and device are part of the evidence. `steps` is the planned
    length of the loop, against which fixes are weighed, and `tokens_per_step` what a step trains
    on, in all processes. `recorded_steps` run once under torch.profiler. 0 turns that off.

    Of several processes, only rank 0 measures and prints. A new watch ends the one before it.
    Raises: ConfigError for an argument that cannot be.
    """
    for one in LATEST:
        one.finish()
    LATEST[:] = [Watch(model, steps, tokens_per_step, recorded_steps)]
    return LATEST[0]


class Watched(Generic[Batch]):
    """Batches whose waits are timed. Everything else is the loader's own."""

    def __init__(self, loop: Follower, batches: Iterable[Batch]) -> None:
        self._loop, self._batches = loop, batches
        self._iterator: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch."""
        iterator = self._loop.waiting(iter, self._batches)  # may start processes
        while (batch := self._loop.waiting(next, iterator, LATEST)) is not LATEST:
            yield batch
        self._loop.end_epoch()

    def __next__(self) -> Batch:
        """Return the next batch of an iterator, or of a loader's first epoch."""
        self._iterator = self._iterator or iter(self)
        return next(self._iterator)

    def __len__(self) -> int:
        """Return the number of batches, if the loader knows it."""
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("_batches"), name)  # a copy is made without it


class Watch:
    """Watches one loop. Make it with `flatout.watch`.

    Use it as a context to print the findings when the loop ends. Without one, they are printed
    when the process exits, unless `verdict` or `diagnosis` was called before.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        steps: int | None,
        tokens_per_step: int | None,
        recorded_steps: int,
    ) -> None:
        self._planned_steps, self._tokens_per_step = steps, tokens_per_step
        self._loop = Follower(
            "watched loop", at_exit=self.finish, model=model, recorded_steps=recorded_steps
        )
        self._evidence: Evidence | None = None
        self._was_asked = False

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return self._loop.steps

    def __call__(self, batches: Iterable[Batch]) -> Watched[Batch]:
        """Return the batches. The time that the loop waits for each is measured."""
        return Watched(self._loop, batches)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for one step: forward, backward, optimizer.

        Without it, a step lasts from one step of the main optimizer to the next. Gradient
        accumulation may be inside or outside.
        """
        self._loop.begin_step()
        try:
            yield
        except BaseException as error:
            self._loop.end_step(error)
            raise
        self._loop.end_step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the block does, such as "evaluation", "checkpoint", "logging" or "data_wait".

        Raises: ConfigError for an unknown name.
        """
        if name not in PHASES:
            raise ConfigError(f"{name!r} is not a phase.", fix=f"Use one of {', '.join(PHASES)}.")
        self._loop.enter(name)
        try:
            yield
        finally:
            self._loop.leave(name)

    def log(self, **figures: Any) -> None:
        """Log the loss of the current step: loss=loss. Tensors are read one step later, without
        waiting.

        Shapes: each tensor has one element.
        """
        self._loop.log(figures, step=self.steps + 1)

    def evidence(self) -> Evidence:
        """Return what has been measured so far.

        Raises: ConfigError when no step has been watched.
        """
        if self._evidence is not None:
            return self._evidence
        found, stages = self._loop.evidence(), self._loop.stages
        planned, tokens = self._planned_steps, self._tokens_per_step
        update: dict[str, float | None] = {"planned_steps": planned, "tokens_per_step": tokens}
        if found.step_s and stages is not None:
            update["tokens_per_s"] = tokens and tokens / stages.step_s
            update["remaining_s"] = planned and max(planned - self.steps, 0) * found.step_s
        return found.model_copy(update=update)

    def diagnosis(self) -> Diagnosis:
        """Return the verdict, the findings and their fixes.

        Raises: ConfigError when no step has been watched.
        """
        self._was_asked = True
        return diagnosis_of(self.evidence())

    def verdict(self) -> str:
        """Return the most important finding in one line, on other ranks that rank 0 is watched.

        Raises: ConfigError when no step has been watched.
        """
        return self._elsewhere or self.diagnosis().verdict

    def __repr__(self) -> str:
        """Return what is known so far, as a notebook shows it."""
        if not self.steps:
            return "A watch that has seen no step."
        return f"{self.verdict()} ({counted(self.steps, 'step')})"

    def _repr_html_(self) -> str:
        """Return the findings as a page, which notebooks show."""
        return html(self.diagnosis().display()) if self.steps else repr(self)

    def finish(self) -> None:
        """Stop measuring, remove all hooks, and print the findings.

        Happens by itself at the end of a `with` block and when the process exits.
        """
        if self._evidence is None and self._loop.end():
            try:
                self._tell()
            except Exception as error:  # the loop is over, and its own result matters more
                LOG.warning("flatout.watch could not show what it measured: %r", error)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def __str__(self) -> str:
        """Return the findings as text."""
        return self._elsewhere or self.diagnosis().summary()

    @property
    def _elsewhere(self) -> str:
        return f"Rank 0 is watched, and this is rank {self._loop.rank}." * (self._loop.rank > 0)

    def _tell(self) -> None:
        self._evidence = self.evidence()
        if not self._was_asked:
            print(self, file=sys.stderr)
