"""The steps of first_contact.py other than measurements: the environment and the GPU tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARKER = "gpu_essential"
TEST_SETTINGS = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""One compile process per test worker is enough."""
GPU_TESTS = (
    *(
        "-m",
        "pytest",
        "-m",
        MARKER,
        "-v",
        "-W",
        "default",
        "--disable-warnings",
        "--tb=line",
        "--show-capture=no",
        "-p",
        "no:cacheprovider",
    ),
    *(
        "-n",
        "12",
        "--dist",
        "worksteal",
        "--timeout",
        "90",
        "--timeout-method",
        "thread",
        "--session-timeout",
        "105",
    ),
    "--continue-on-collection-errors",
)
"""The essential half of the GPU tests; runs in under 120 s."""
TINY_TESTS = (
    "-m",
    "pytest",
    "-m",
    "gpu",
    "-n",
    "0",
    "-v",
    "-p",
    "no:cacheprovider",
    "--tb=line",
    "tests/ops/test_gpu.py",
)
OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+)|(\S+::\S+.*?)"
    r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b)"
)
MOST_NAMES = 20
PROFILE_STEPS, TINY_PROFILE_STEPS = 3, 1
TELL = """
import importlib.metadata, json, platform, sys, torch
from flatout.hardware import fingerprint, probe
names = "torch triton numpy pydantic torchao liger_kernel transformers".split()
found = {"machine": probe().describe(), "python": platform.python_version(), "packages": {}}
for name in names:
    try: found["packages"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: found["packages"][name] = None
device = "cuda" if torch.cuda.is_available() else "cpu"
found["fingerprint"] = fingerprint(device)
if device == "cuda":
    found["free_gib"] = torch.cuda.mem_get_info()[0] / 2**30
    bytes_ = 1 << 32
    one = torch.empty(bytes_, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    for _ in range(3): other.copy_(one)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10): other.copy_(one)
    end.record()
    torch.cuda.synchronize()
    found["copy_tb_per_s"] = 10 * 2 * bytes_ / begin.elapsed_time(end) / 1e9
print(json.dumps(found))
"""


def environment(limit_s: float, *, tiny: bool) -> dict[str, Any]:
    """Return the GPU, the versions, the copy bandwidth, and whether the command line starts."""
    found: dict[str, Any] = {"status": "ok"}
    code, out, err = finished([sys.executable, "-c", TELL], limit_s)
    if code:
        return {"status": "failed", "failed": [last_line(err)]}
    found |= json.loads(out.strip().splitlines()[-1])
    code, out, err = finished([sys.executable, "-m", "flatout", "--version"], limit_s)
    found["flatout"] = out.strip() if code == 0 else None
    return (
        found
        if code == 0
        else found
        | {
            "status": "failed",
            "failed": [f"python -m flatout --version: {last_line(err)}"],
        }
    )


def gpu_tests(limit_s: float, *, tiny: bool) -> dict[str, Any]:
    """Run the essential GPU tests; return counts by outcome and the names of failed tests.

    They are stopped after `limit_s`; tests that finished before are counted.
    """
    began_s = time.monotonic()
    if not tiny and not marked_files():
        return {"status": "failed", "failed": [f"no test is marked {MARKER}"], "seconds": 0.0}
    code, out, err = finished(
        [sys.executable, *(TINY_TESTS if tiny else (*GPU_TESTS, *marked_files()))],
        limit_s,
        settings=TEST_SETTINGS,
    )
    outcomes = [
        (found[1] or found[4], found[2] or found[3])
        for line in out.splitlines()
        if (found := OUTCOME.match(line))
    ]
    counts = Counter(outcome for outcome, _ in outcomes)
    failed = [name for outcome, name in outcomes if outcome in ("FAILED", "ERROR")]
    reasons = [line[:300] for line in out.splitlines() if re.match(r"(E  |\S+\.py:\d+: )", line)]
    made = {
        "status": "timed-out" if code is None else "ok",
        "seconds": round(time.monotonic() - began_s, 1),
        "passed": counts["PASSED"],
        "skipped": counts["SKIPPED"],
        "failed": list(dict.fromkeys(failed)),
        "reasons": reasons[:MOST_NAMES],
    }
    if not outcomes:  # nothing was collected, or pytest itself failed
        return made | {
            "status": "failed",
            "failed": [f"pytest exited with code {code}: {last_line(err or out)}"],
        }
    return made


def marked_files() -> list[str]:
    """Return the test files with GPU tests.

    Other files, and the packages they import, are not needed.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(path.relative_to(ROOT))
        for path in files
        if f"mark.{MARKER}" in path.read_text(encoding="utf-8")
    ]


def profile_steps(*, tiny: bool) -> int:
    """Return the number of profiled steps."""
    return TINY_PROFILE_STEPS if tiny else PROFILE_STEPS


def finished(
    command: list[str], limit_s: float, *, settings: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Run a command in the repository; return its exit code (None if stopped) and output.

    `settings` are added to its environment.
    """
    from flatout.measure.trials.trial import end_group

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        given = {
            "stdout": out,
            "stderr": err,
            "stdin": subprocess.DEVNULL,
            "cwd": ROOT,
            "env": {**os.environ, **(settings or {})},
        }
        process = subprocess.Popen(command, start_new_session=True, text=True, **given)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return code, texts[0], texts[1]


def last_line(text: str) -> str:
    """Return the last non-empty line."""
    return next(
        (line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()),
        "nothing was printed",
    )


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/first_contact.py; run: python benchmarks/first_contact.py"
        " --help"
    )
