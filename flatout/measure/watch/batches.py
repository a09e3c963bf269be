"""Batches and steps of a watched loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Self, TypeVar

from flatout.measure.watch.loop import LoopTimer

Batch = TypeVar("Batch")


class Watched(Generic[Batch]):
    """Batches whose waits are timed. Everything else is the loader's own."""

    def __init__(self, loop: LoopTimer, batches: Iterable[Batch]) -> None:
        self._loop, self._batches = loop, batches
        self._iterator: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch."""
        is_timed = self._loop.begin_opening()
        try:
            iterator = iter(self._batches)
        finally:
            if is_timed:
                self._loop.leave("data_wait")
        return Epoch(self._loop, iterator)

    def __next__(self) -> Batch:
        """Return the next batch of an iterator, or of a loader's first epoch."""
        if self._iterator is None:
            self._iterator = iter(self)
        return next(self._iterator)

    def __len__(self) -> int:
        """Return the number of batches, if the loader knows it."""
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class Epoch(Generic[Batch]):
    """An iterator over the batches of one epoch."""

    def __init__(self, loop: LoopTimer, iterator: Iterator[Batch]) -> None:
        self._loop, self._iterator = loop, iterator

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        is_timed, has_ended = self._loop.begin_wait(), False
        try:
            return next(self._iterator)
        except StopIteration:
            has_ended = True
            raise
        finally:
            if is_timed:
                self._loop.end_wait()
            if has_ended:
                self._loop.end_epoch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class Step:
    """A context around the work of one step. Errors of the loop pass through."""

    def __init__(self, loop: LoopTimer) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.begin_step()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._loop.end_step(error)
