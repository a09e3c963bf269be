"""Runs each measurement in its own process, and computes the digest of the measuring code."""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.measure.trials.trial import end_group
from flatout.registry import PACKAGE_DIR

HERE = Path(__file__).parent


@functools.cache
def code_digest(*, ours: bool) -> str:
    """Return a digest of the measuring code, with flatout's own if `ours`."""
    digest = hashlib.sha256()
    for path in code_files(ours):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def code_files(ours: bool) -> Iterator[Path]:
    """Yield the files, in order."""
    yield from (HERE / "throughput_worker.py", HERE / "throughput_peers.py")
    if ours:
        yield HERE / "throughput_entries.py"
        yield from sorted(
            path for path in PACKAGE_DIR.rglob("*") if path.suffix in (".py", ".yaml")
        )


def run_apart(
    spec: dict[str, Any], timeout_s: float, *, command: list[str] | None = None
) -> dict[str, Any]:
    """Measure in a new process; return a result even if it crashes, hangs or prints no JSON.

    `command` replaces the process in tests.
    """
    program = (
        f"import sys; sys.path[:] = {[str(HERE), *sys.path]!r}; from throughput_worker import main;"
        " main()"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command or [sys.executable, "-c", program],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
        text=True,
    )
    try:
        out, err = process.communicate(
            json.dumps(spec), timeout=timeout_s if timeout_s < float("inf") else None
        )
    except subprocess.TimeoutExpired:
        return {"status": "timed-out", "reason": f"It did not finish within {timeout_s:.0f} s."}
    finally:
        end_group(process)
    with suppress(ValueError, IndexError):
        return dict(json.loads(out.strip().splitlines()[-1]))
    last_line = (err.strip().splitlines() or ["nothing"])[-1][:300]
    return {
        "status": "failed",
        "reason": (
            f"The process exited with code {process.returncode} and without figures; its last"
            f" output: {last_line}"
        ),
    }


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/throughput.py; run: python benchmarks/throughput.py --help"
    )
