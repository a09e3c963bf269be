"""What torch.compile has done in this process since it was last asked: graphs, breaks, reasons,
seconds.

Nothing is hooked into the compiler: its own counters are read, which costs a step less than two
microseconds.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

LONGEST_REASON = 300
"""Characters of a reason that are kept."""


class Counts(NamedTuple):
    """The compiler's counters."""

    graphs: int = 0
    breaks: int = 0
    refused: int = 0
    """Calls that it gave up on, its limit of recompilations among the reasons."""


@dataclass(frozen=True)
class Compilations:
    """What was compiled in some span of time."""

    graphs: int
    """Graphs of a forward pass; their backward passes come with them."""
    graph_breaks: int
    first_break: str | None
    """Why the first of them was, and at which line; None where there was none."""
    reasons: tuple[str, ...]
    """Why what had been compiled already was compiled again."""
    compile_s: float
    cuda_graphs_skipped: int
    """Graphs that could not become CUDA graphs."""


class CompilationWatch:
    """Tells what is new since the last look."""

    def __init__(self) -> None:
        self._seen = counts()
        self._skipped = _skipped()
        self._last_event = next(reversed(_events()), None)

    def changed(self) -> bool:
        """Say whether anything was compiled, or given up on, since the last look."""
        return counts() != self._seen

    def look(self) -> Compilations:
        """Return what is new, and begin again from here."""
        now, skipped = counts(), _skipped()
        new = Counts(
            *(max(after - before, 0) for after, before in zip(now, self._seen, strict=True))
        )
        events = list(
            itertools.takewhile(lambda event: event is not self._last_event, reversed(_events()))
        )[::-1]
        found = Compilations(
            graphs=new.graphs,
            graph_breaks=new.breaks,
            first_break=_first_break(new.breaks),
            reasons=tuple(
                dict.fromkeys(
                    _reason(event)
                    for event in events
                    if event.recompile_reason or event.fail_reason
                )
            ),
            compile_s=sum(float(event.duration_us or 0) * 1e-6 for event in events),
            cuda_graphs_skipped=max(skipped - self._skipped, 0),
        )
        self._seen, self._skipped, self._last_event = (
            now,
            skipped,
            events[-1] if events else self._last_event,
        )
        return found


def counts() -> Counts:
    """Return the counters as they stand; zeros while the compiler has not even been imported."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    if compiler is None:
        return Counts()
    kept = compiler.counters
    return Counts(
        kept["stats"]["unique_graphs"],
        sum(kept["graph_break"].values()),
        sum(kept["unimplemented"].values()),
    )


def _skipped() -> int:
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["inductor"]["cudagraph_skips"])


def _events() -> list[Any]:
    """The compiler's records of its last few dozen compilations, forward, backward and refused."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return [] if compiler is None else compiler.get_compilation_metrics()


def _reason(event: Any) -> str:
    """Why one was compiled again, in the compiler's words."""
    why = str(event.recompile_reason or event.fail_reason)
    limit = (
        "; the compiler's limit is reached, and this runs uncompiled"
        if "recompile limit" in str(event.fail_reason)
        else ""
    )
    return shortened(why) + limit


def _first_break(number: int) -> str | None:
    """Why the first of the last `number` breaks was, and where."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    if not number or not compiler.graph_break_reasons:
        return None
    first = compiler.graph_break_reasons[-number:][0]
    place = first.user_stack[-1] if first.user_stack else None
    where = f" at {place.filename}:{place.lineno}" if place is not None else ""
    return shortened(first.reason) + where


def shortened(text: str) -> str:
    """Return the first line of a compiler's explanation, with single spaces, cut where it is very
    long.
    """
    line = " ".join((text.strip().splitlines() or [""])[0].split("#")[0].split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."
