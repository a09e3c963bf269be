"""What benchmarks share: commands in their own processes, turns, spreads, tables, result files."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flatout.hardware.machine import probe
from flatout.measure.output import commit_of_package

RESULTS = Path(__file__).parent / "results"
PATHS = ("run", "path", "resumed_from", "by_dataset")
"""Fields that contain temporary directories."""
Found = TypeVar("Found")


def parser(about: str | None, **options: float | str | Sequence[int]) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command line, whose help is its docstring, `about`.

    Each of `options` becomes an option with that default. A list takes several numbers.
    """
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in options.items():
        is_list = isinstance(value, list)
        kind, count = (type(value[0]), "+") if is_list else (type(value), None)
        made.add_argument(f"--{name.replace('_', '-')}", type=kind, nargs=count, default=value)
    made.add_argument("--out", type=Path, default=RESULTS, help="directory for the results")
    return made


def facts() -> dict[str, str]:
    """Return the machine, and the short commit hash, with + if the package has changed."""
    return {"machine": probe().describe(), "commit": commit_of_package() or "unknown"}


def publish(out: Path, name: str, found: Mapping[str, Any], text: str) -> None:
    """Write the results to OUT/NAME.json and their table to OUT/NAME.md, and print it."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


def in_turns(
    ways: Mapping[str, Callable[[], Found]], rounds: int, *, warm_up: int = 0
) -> dict[str, list[Found]]:
    """Call every way once per round, in alternating order, and return their results.

    The first `warm_up` rounds are dropped.
    """
    found: dict[str, list[Found]] = {name: [] for name in ways}
    for number in range(-warm_up, rounds):
        for name in [*ways][:: -1 if number % 2 else 1]:
            result = ways[name]()
            if number >= 0:
                found[name].append(result)
            print(f"round {number + 1}, {name}: {str(result)[:200]}", file=sys.stderr, flush=True)
    return found


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def json_of(words: Sequence[object], **options: Any) -> dict[str, Any]:
    """Run a command, and return the JSON in the last line of its output."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def flatout(*words: object, **options: Any) -> dict[str, Any]:
    """Run a command of flatout; return its --json and the seconds of the whole process."""
    began_s = time.perf_counter()
    found = json_of([sys.executable, "-m", "flatout", *words, "--json"], **options)
    figures = {name: value for name, value in found.items() if name not in PATHS}
    return {**figures, "process_s": time.perf_counter() - began_s}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def spread(values: Iterable[float], digits: int = 0) -> str:
    """Return the median, with minimum and maximum in brackets."""
    values = [*values]
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def ratios(slow: Iterable[float], fast: Iterable[float]) -> list[float]:
    """Return the ratio of each pair."""
    return [one / other for one, other in zip(slow, fast, strict=True)]


def verdict(is_kept: bool) -> str:
    """Return whether a target is kept, in Markdown."""
    return "kept" if is_kept else "**missed**"


def markdown(columns: str, rows: Iterable[Iterable[object]], *notes: str) -> str:
    """Return a table, whose columns are separated by `|`, and lines of notes below it."""
    lines = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    lines += ["|" + "".join(f" {cell} |" if cell != "" else " |" for cell in row) for row in rows]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def text_parser(about: str | None, **options: float) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that trains on the characters of Shakespeare."""
    made = parser(about, **options)
    made.add_argument(
        "--text", type=Path, required=True, help="text file named by the dataset card `shakespeare`"
    )
    return made


def prepared(data: Path, text: Path) -> Path:
    """Prepare the text as characters, anew, and return the path of the dataset."""
    shutil.rmtree(data, ignore_errors=True)
    flatout("prepare", "shakespeare", "--from", text, "--tokenizer", "char", "--out", data)
    return data
