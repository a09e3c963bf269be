"""Training throughput of flatout and its peers on one GPU, by model shape.

    python benchmarks/throughput.py --nanogpt path/to/nanoGPT --only gpt2-124m --minutes 9
    # check on a CPU, at toy shapes, that every entry runs
    python benchmarks/throughput.py --tiny --out FOLDER

flatout runs its normal path: the recipe, its speedups, a packed dataset, the feed and the training
loop. A peer's model takes the same step (forward, backward, clip at 1.0, its fused AdamW) on random
tokens of the same shape that are already on the GPU. Each measurement runs in its own process and
is the median of 20 steps after 8 of warm-up. The first round tries every entry at several batches;
later rounds repeat the best one and those within 3% of it, with the entries interleaved. MFU counts
6 N_matmul + 6 L T d FLOPs per token, relative to the rate of a bf16 matmul of size 8192 measured in
the same process.

Tokens are random, drawn from half of the vocabulary. A model that trains learns which half: an
entry whose loss does not fall by 1% on unseen batches fails.

OUT/throughput.json is written after each measurement, and the same command continues from it.
Measurements of other code, another machine or another torch version are repeated. Nothing is
installed: a missing peer is skipped with a message.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from main_job import RESULTS
from throughput_available import Availability
from throughput_data import random_data, text_data
from throughput_entries import (
    ENTRIES,
    STEPS,
    TINY_ROWS,
    TINY_STEPS,
    TINY_VOCABULARY,
    VOCABULARY,
    WORKS,
    Entry,
    shape,
)
from throughput_ladder import ladder
from throughput_process import code_digest, run_apart
from throughput_report import Measurements, best_rows, read_document, table, verdicts

from flatout.config.schema import RunConfig
from flatout.files import write_text
from flatout.hardware import Machine, probe
from flatout.measure.trials.results import commit_of_package
from flatout.measure.trials.rounds import in_turn

NAME = "throughput"
TOKENS, TINY_TOKENS = 1 << 23, 1 << 15
LIMIT_S = 300.0
"""A measurement that takes longer is stopped and recorded as timed out."""
FIRST_GUESS_S = 75.0
"""Expected seconds of an entry's first measurement; most of it is compilation."""


def main(words: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(words)
    machine = probe()
    if arguments.list:
        print("\n".join(f"{entry.work}/{entry.name}: {entry.title}" for entry in ENTRIES))
        return
    if not arguments.tiny and not machine.gpus:
        raise SystemExit(
            "This benchmark needs a GPU, and none was found. --tiny runs every entry at toy shapes"
            " on the CPU."
        )
    with tempfile.TemporaryDirectory(prefix="flatout-throughput-") as scratch:
        out = arguments.out or (Path(scratch) / "results" if arguments.tiny else RESULTS)
        out.mkdir(parents=True, exist_ok=True)
        if arguments.ladder:
            ladder(
                out,
                Path(scratch),
                minutes=arguments.minutes,
                rounds=arguments.rounds,
                tiny=arguments.tiny,
            )
            return
        Session(arguments, machine, out, Path(scratch)).measure()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--only",
        default="*",
        help="workloads or workload/entry, with * and ?, separated by commas; --list names them",
    )
    made.add_argument(
        "--minutes",
        type=float,
        help="start no measurement that would not finish in time; the same command continues",
    )
    made.add_argument(
        "--rounds", type=int, help="measurements of each entry's best batch; 3, and 1 with --tiny"
    )
    made.add_argument(
        "--out", type=Path, help="folder of the results; by default benchmarks/results"
    )
    made.add_argument(
        "--again", action="store_true", help="repeat the measurements that --only selects"
    )
    made.add_argument(
        "--tiny",
        action="store_true",
        help="toy shapes on the CPU; --out FOLDER keeps the results",
    )
    made.add_argument("--list", action="store_true", help="list the workloads and their entries")
    made.add_argument(
        "--ladder",
        action="store_true",
        help="measure the ladder of gpt2-124m instead: throughput_ladder.json and .md",
    )
    made.add_argument("--commit", help="commit to record if there is no repository")
    for peer in ("nanogpt", "litgpt", "nanochat"):
        made.add_argument(f"--{peer}", type=Path, help=f"a folder with {peer}")
    return made


@dataclass
class Session:
    """One command; its measurements are added to the file of earlier commands."""

    arguments: argparse.Namespace
    machine: Machine
    out: Path
    scratch: Path
    began_s: float = field(default_factory=time.monotonic)
    available: Availability = field(init=False)

    def __post_init__(self) -> None:
        self.available = Availability(self.arguments, self.machine, self.say)

    def measure(self) -> None:
        """Measure the remaining entries round by round, writing after each measurement."""
        entries = [entry for entry in ENTRIES if is_selected(entry, self.arguments.only)]
        if not entries:
            raise SystemExit(
                f"--only {self.arguments.only} matches nothing. --list names the workloads and"
                " their entries."
            )
        rounds = self.arguments.rounds or (1 if self.arguments.tiny else 3)
        found = self.read()
        self.forget(found, entries)
        works = {work.name: shape(work, tiny=self.arguments.tiny) for work in WORKS}
        ready = [
            (entry, config)
            for entry in entries
            if (config := self.available.config(entry, works[entry.work])) is not None
        ]
        left = 0
        for number in range(rounds):
            for work in works:
                left += self.round(
                    number,
                    {entry.name: (entry, config) for entry, config in ready if entry.work == work},
                    found,
                )
        self.write(found)
        print(table(found))
        if left:
            self.say(f"The time is up with {left} measurements left; the same command continues.")

    def round(
        self, number: int, ready: dict[str, tuple[Entry, RunConfig]], found: Measurements
    ) -> int:
        """Measure each entry of a workload once per batch; return how many did not fit in the time.

        The first batch of every entry precedes the second ones, so that an interrupted round still
        allows a comparison.
        """
        left = 0
        order = in_turn(list(ready), number)
        batches = {
            name: self.batches(ready[name][0]) if number == 0 else best_rows(found, ready[name][0])
            for name in order
        }
        for index in range(max(map(len, batches.values()), default=0)):
            for name in order:
                entry, config = ready[name]
                for rows in batches[name][index : index + 1]:
                    if not any(
                        row["round"] == number and row["rows"] == rows for row in found.of(entry)
                    ):
                        left += not self.point(entry, rows, number, config, found)
        return left

    def point(
        self, entry: Entry, rows: int | None, number: int, config: RunConfig, found: Measurements
    ) -> bool:
        """Measure an entry at one batch and store the row; return whether there was time."""
        remaining_s = self.remaining_s()
        known_s = [row["process_s"] for row in found.of(entry) if row["status"] == "ok"]
        if remaining_s < max(known_s, default=0.0 if self.arguments.tiny else FIRST_GUESS_S):
            return False
        row = self.row(entry, rows, number, config, min(LIMIT_S, remaining_s))
        if row["status"] == "timed-out" and remaining_s < LIMIT_S:
            return False  # the command's time was up, not the measurement's
        self.keep(row, found)
        return True

    def row(
        self,
        entry: Entry,
        rows: int | None,
        number: int,
        config: RunConfig,
        limit_s: float,
        **more: Any,
    ) -> dict[str, Any]:
        """Measure an entry at one batch and return the row; `more` extends the worker's spec."""
        batch = (
            {}
            if rows is None
            else {
                "batch.rows_per_device": rows,
                "batch.accumulate": 1,
                "batch.tokens_per_step": rows * config.data.seq_len,
            }
        )
        if rows is None and entry.micro_batch and not self.arguments.tiny:
            batch = {"batch.rows_per_device": entry.micro_batch, "batch.accumulate": None}
        spec = {
            "kind": entry.kind,
            "config": (
                config.with_values(
                    batch | {"data.path": str(self.data(entry.data)), "train.seed": number}
                ).to_dict()
            ),
            "rows": rows,
            "compiled": entry.compiled and not self.arguments.tiny,
            "peer_folder": self.available.folder(entry.kind),
            "vocabulary": TINY_VOCABULARY if self.arguments.tiny else VOCABULARY,
            "folder": tempfile.mkdtemp(dir=self.scratch),
            **(TINY_STEPS if self.arguments.tiny else STEPS),
            **more,
        }
        began_s = time.monotonic()
        result = run_apart(spec, limit_s)
        named = {
            "work": entry.work,
            "entry": entry.name,
            "rows": rows,
            "round": number,
            "process_s": round(time.monotonic() - began_s, 1),
        }
        return {
            **named,
            **result,
            **self.identity(entry),
            "commit": self.arguments.commit or commit_of_package() or "",
        }

    def keep(self, row: dict[str, Any], found: Measurements) -> None:
        """Store a row and print it."""
        found.add(row)
        self.write(found)
        figures = (
            f"{row['tokens_per_s']:,.0f} tokens/s, {row['peak_gib']:.1f} GiB"
            if row["status"] == "ok"
            else row["reason"]
        )
        self.say(
            f"round {row['round'] + 1}: {row['work']}/{row['entry']}, batch"
            f" {row['rows'] or 'of the recipe'}: {figures}"
        )

    def batches(self, entry: Entry) -> Sequence[int | None]:
        """Return the batches to try; one at toy shapes."""
        return (
            tuple(rows and TINY_ROWS for rows in entry.rows[:1])
            if self.arguments.tiny
            else entry.rows
        )

    def data(self, kind: str) -> Path:
        """Return the dataset of a kind; it is made on first use."""
        out, tiny = self.scratch / kind, self.arguments.tiny
        vocabulary = TINY_VOCABULARY if tiny else VOCABULARY
        if out.exists():
            return out
        if kind == "text":
            return text_data(out, vocabulary=vocabulary, max_bytes=1 << 20 if tiny else None)
        return random_data(out, tokens=TINY_TOKENS if tiny else TOKENS, vocabulary=vocabulary)

    def identity(self, entry: Entry) -> dict[str, str]:
        """Return the facts that a figure depends on; when one changes, the figure is stale.

        A peer's figures do not depend on flatout's code.
        """
        device = (
            self.machine.gpus[0].name
            if self.machine.gpus and not self.arguments.tiny
            else self.machine.cpu_name
        )
        return {
            "machine": self.machine.describe(),
            "device": device,
            "torch": version("torch"),
            "code": code_digest(ours=entry.kind == "flatout"),
        }

    def forget(self, found: Measurements, entries: Sequence[Entry]) -> None:
        """Drop stale measurements with a message."""
        for entry in entries:
            own = found.of(entry)
            identity = self.identity(entry)
            stale = [
                row
                for row in own
                if self.arguments.again
                or any(row[key] != value for key, value in identity.items() if key != "machine")
            ]
            if stale:
                found.drop(stale)
                self.say(
                    f"{entry.work}/{entry.name}: {len(stale)} measurements of other code or another"
                    " machine are dropped and repeated."
                )

    def read(self) -> Measurements:
        """Return the measurements of earlier commands."""
        path = self.out / f"{NAME}.json"
        held = (
            read_document(path, "tiny", "measurements")
            if path.exists()
            else {"tiny": self.arguments.tiny, "measurements": []}
        )
        if held["tiny"] != self.arguments.tiny:
            raise SystemExit(
                f"{path} contains {'toy' if held['tiny'] else 'real'} shapes. Fix: give another"
                " folder for the results."
            )
        return Measurements(held["measurements"], tiny=self.arguments.tiny)

    def write(self, found: Measurements) -> None:
        """Write the figures, the verdicts and the table."""
        document = {"tiny": found.tiny, "targets": verdicts(found), "measurements": found.rows}
        write_text(self.out / f"{NAME}.json", json.dumps(document, indent=1) + "\n")
        write_text(self.out / f"{NAME}.md", table(found))

    def remaining_s(self) -> float:
        """Return the seconds left for this command."""
        return (
            float("inf")
            if self.arguments.minutes is None
            else 60 * self.arguments.minutes - (time.monotonic() - self.began_s)
        )

    def say(self, line: str) -> None:
        """Print a line to stderr."""
        print(line, file=sys.stderr, flush=True)


def is_selected(entry: Entry, only: str) -> bool:
    """Return whether `--only` matches an entry or its workload."""
    return any(
        fnmatch.fnmatchcase(name, word.strip())
        for word in only.split(",")
        for name in (entry.work, f"{entry.work}/{entry.name}")
    )


if __name__ == "__main__":
    main()
