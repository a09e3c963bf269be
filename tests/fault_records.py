"""Counts what `make test-faults` survives, and writes the table of it for the documentation.

`make test-faults ARGS=--write-tables` replaces the counts of the tests that run.
"""

import json
import os
import sys
from pathlib import Path

from flatout.storage.files import lock

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"

FAULTS = {
    "kill": "`kill -9` at a random moment, mostly within a save",
    "call": "`kill -9` between two file operations of a save, or at an exact system call of a run",
    "rank": "`kill -9` of one of two processes of a run",
    "prune-kill": "`kill -9` while old checkpoints are deleted, between two file operations",
    "upload-kill": "`kill -9` while checkpoints are uploaded, at a random moment or at an exact "
    "system call",
    "prepare-kill": "`kill -9` of a process of `prepare`",
    "power": "power loss while training: only synced data and names survive, or any part of more",
    "upload-power": "the same while checkpoints are uploaded",
    "rank-power": "the same with two processes, DDP and fully sharded",
    "prepare-power": "power loss during `prepare`",
    "full": "a write that fails because the disk is full (ENOSPC), once or from then on",
    "broken": "a failed read or write (EIO), once or from then on",
    "network": "an operation that a network disk rejects (EBUSY, ENOTEMPTY, EXDEV, ESTALE, "
    "EOPNOTSUPP, EPERM)",
    "small": "a file system that fills up while training or `prepare` runs",
    "run-file": "a file of a run cut to 0, 50 or 99%, or with a flipped bit",
    "upload-file": "a file of a remote copy cut, with a flipped bit, missing, or replaced by a "
    "pickle",
    "data-file": "a file of a dataset cut to 0, 50 or 99%, or with a flipped bit",
    "export-file": "the same in an export that a new run starts from",
    "pickle": "a pickle in place of a file of a checkpoint, a dataset or an export",
    "key": "a key of a JSON or YAML file of a run deleted, renamed or set to a different value",
    "read-only": "a read-only file system",
    "two": "a second process in a run directory that is in use",
}
"""What each fault does, in the order of the table."""


def record(fault: str, case: str, tries: int, survived: int, *, results: Path = RESULTS) -> None:
    """Store the counts of one test, and write the table beside them."""
    results.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(results.parent, os.O_RDONLY)
    try:
        lock(folder, wait_s=60)
        found = json.loads(results.read_text()) if results.exists() else {"faults": {}}
        found["faults"].setdefault(fault, {})[case] = [tries, survived]
        found |= measured()
        results.write_text(json.dumps(found, indent=1) + "\n")
        results.with_suffix(".md").write_text(table(found))
    finally:
        os.close(folder)


def measured() -> dict[str, str]:
    """Return the machine and the commit."""
    sys.path.append(str(ROOT / "benchmarks"))
    from measurement import facts

    return facts()


def table(found: dict) -> str:
    """Return the counts as Markdown."""
    rows = ["| fault | tries | survived |", "|---|---|---|"]
    for fault, what in FAULTS.items():
        cases = found["faults"].get(fault, {}).values()
        tries, survived = (sum(case[place] for case in cases) for place in (0, 1))
        if cases:
            rows.append(f"| {what} | {tries:,} | {survived:,} |")
    foot = f"{found['machine']}; commit {found['commit']}; `make test-faults ARGS=--write-tables`."
    return "\n".join([*rows, "", foot]) + "\n"
