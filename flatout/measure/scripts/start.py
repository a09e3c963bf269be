"""Starts a script with flatout's hook ahead of its imports, and waits for the answer. No torch."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from flatout.measure.scripts.request import Answer, Request
from flatout.measure.scripts.run import GRACE_S, HOOK, POLL_S, end_tree
from flatout.parallel.rendezvous import own_environment


class Started(NamedTuple):
    """How a script ended."""

    answer: Answer
    code: int | None
    """Exit code; None: it was ended."""
    output: str
    """What it printed, if that was captured."""


def start(
    words: Sequence[str],
    request: Request,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    limit_s: float = math.inf,
) -> Started:
    """Run a script until it answers, and return the answer.

    `environment` is added to this process's own. In another `folder` its output is captured, and
    there is no standard input; otherwise both are this process's.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-") as name, ExitStack() as stack:
        own = Path(name)
        shutil.copyfile(HOOK, own / "sitecustomize.py")
        asked = request.model_copy(update={"answer": str(own / "answer.json")})
        (own / "request.json").write_text(asked.model_dump_json(), encoding="utf-8")
        before = own_environment()
        paths = [name, *filter(None, [before.get("PYTHONPATH")])]
        hooked = {
            "PYTHONPATH": os.pathsep.join(paths),
            "FLATOUT_ATTACH": str(own / "request.json"),
        }
        output = stack.enter_context(tempfile.TemporaryFile()) if folder else None
        process = subprocess.Popen(
            [sys.executable, *words] if words[0].endswith(".py") else [*words],
            cwd=folder,
            env={**before, **(environment or {}), **hooked},
            stdin=subprocess.DEVNULL if folder else None,
            stdout=output,
            stderr=subprocess.STDOUT if folder else None,
        )
        code, began_s, answered_s = None, time.monotonic(), None
        try:
            while (code := process.poll()) is None:
                time.sleep(POLL_S)
                now_s = time.monotonic()
                if answered_s is None and Path(asked.answer).exists():
                    answered_s = now_s
                if now_s - began_s > limit_s or (answered_s and now_s - answered_s > GRACE_S):
                    break
        finally:
            end_tree(process)
        try:
            answer = Answer.model_validate_json(Path(asked.answer).read_bytes())
        except (OSError, ValidationError):
            answer = Answer(problem="no optimizer of torch took a step in it")
        printed = b""
        if output is not None:
            output.seek(0)
            printed = output.read()
        return Started(answer, code, printed.decode(errors="replace").strip())
