"""Counts and times the calls that make a host wait, by the line of user code that makes them.

The calls are those in which the host reads a tensor's value, synchronises, empties the allocator's
cache, collects garbage, or copies memory that is not pinned to a GPU. It needs no profiler and no
permission. A marked call costs about two microseconds more. Nothing else becomes slower.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from flatout.config.registry import is_user_code
from flatout.measure.attach.guard import guarded, replaced
from flatout.measure.attach.lines import Line, LineTotals

READS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu", "nonzero")
"""Methods of a tensor that make the host wait for the device."""
MOVES = ("to", "cuda")
"""Methods that may copy to a GPU."""


class MarkedCalls:
    """What was called, how often and for how long, by kind: sync, empty-cache, gc, copy.

    Calls that torch makes inside a marked call are part of it.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """Calls by kind, from anywhere."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Their seconds."""
        self.lines = LineTotals()
        """Those that lines of user code made."""
        self._inside: set[int] = set()
        self._thread = threading.get_ident()

    def by_user(self, kind: str) -> int:
        """Return the number of calls of a kind that lines of user code made."""
        return sum(self.lines.counts.get(kind, {}).values())

    def waits(self, steps: int, *, on_gpu: bool) -> dict[str, float]:
        """Return reads and unpinned copies in an average step, by their names in `Evidence`."""
        expected = self.calls["sync"] - self.by_user("sync")
        totals: dict[str, float] = {
            "syncs": self.calls["sync"],
            "expected_syncs": expected,
            "sync_s": self.seconds["sync"],
        }
        if on_gpu:
            totals |= {
                "pageable_copies": self.calls["copy"],
                "pageable_copy_s": self.seconds["copy"],
            }
        return {name: total / steps for name, total in totals.items()}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the marked calls inside the block, reads and moves only by the thread that enters.

        Those of another thread, such as a loader's, do not make the loop wait.
        """
        self._thread = threading.get_ident()

        def here(kind_of: Callable[[Any, Any], str | None]) -> Callable[[Any, Any], str | None]:
            return lambda *call: kind_of(*call) if threading.get_ident() == self._thread else None

        with ExitStack() as stack:
            for name in READS:
                stack.enter_context(self._marked(torch.Tensor, name, here(_reads)))
            for name in MOVES:
                stack.enter_context(self._marked(torch.Tensor, name, here(_pageable)))
            stack.enter_context(self.recording_rare())
            yield

    @contextmanager
    def recording_rare(self) -> Iterator[None]:
        """Count only the calls that no step should make. It costs nothing where there are none."""
        with ExitStack() as stack:
            stack.enter_context(self._marked(torch.cuda, "synchronize", lambda *_: "sync"))
            stack.enter_context(self._marked(torch.cuda, "empty_cache", lambda *_: "empty-cache"))
            stack.enter_context(self._marked(gc, "collect", lambda *_: "gc"))
            yield

    def _marked(
        self, owner: Any, name: str, kind_of: Callable[[Any, Any], str | None]
    ) -> AbstractContextManager[None]:
        """Replace an attribute by one that counts its calls inside the block."""

        @guarded
        def note(frame: FrameType, args: tuple[Any, ...], seconds: float, result: Any) -> None:
            kind = kind_of(args[0] if args else None, result)
            if kind is not None:
                self._count(kind, frame, seconds)

        def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
            def marked(*args: Any, **kwargs: Any) -> Any:
                thread = threading.get_ident()
                if thread in self._inside:
                    return plain(*args, **kwargs)
                self._inside.add(thread)
                start_s = time.perf_counter()
                try:
                    result = plain(*args, **kwargs)
                finally:
                    self._inside.discard(thread)
                note(sys._getframe(1), args, time.perf_counter() - start_s, result)
                return result

            # what is compiled inside the block must not trace it
            compiles = "torch._dynamo" in sys.modules
            return torch.compiler.disable(marked) if compiles else marked  # type: ignore[no-untyped-call]

        return replaced(owner, name, wrap)

    def _count(self, kind: str, frame: FrameType, seconds: float) -> None:
        self.calls[kind] += 1
        self.seconds[kind] += seconds
        line = _calling_line(frame)
        if line is not None:
            self.lines.add(kind, line, seconds)


def _calling_line(frame: FrameType | None) -> Line | None:
    """Return the line of user code that made a call. None if a package made it.

    An optimizer of torch, for example, reads its number of steps, which is in the host's memory.
    """
    # its wrapper
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch._dynamo"):
        frame = frame.f_back
    if frame is None or not is_user_code(frame.f_code.co_filename):
        return None
    return frame.f_code.co_filename, frame.f_lineno


def _reads(tensor: Any, _result: Any) -> str | None:
    """Return `sync`, except for a tensor of the host beside a GPU, which keeps computing."""
    on_host = tensor.device.type == "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return None if on_host else "sync"


def _pageable(tensor: Any, result: Any) -> str | None:
    """Return `copy` for a copy from memory that is not pinned to a GPU."""
    copies = result.device.type == "cuda" and tensor.device.type == "cpu"
    return "copy" if copies and not tensor.is_pinned() else None
