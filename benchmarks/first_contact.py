"""The first half hour on a GPU: every figure of docs/gpu.md in three short calls, on a machine that
may be bare and offline.

    python benchmarks/first_contact.py --plan                                  # what the calls do,
    and how long it may take python benchmarks/first_contact.py --pack .kit --nanogpt
    path/to/nanoGPT   # collect what a bare machine lacks; prints the calls python
    benchmarks/first_contact.py --call next --kit .kit --results FOLDER # one call: the first that
    is not done python benchmarks/first_contact.py --call 1 --tiny --results FOLDER        # at toy
    shapes on a CPU: proves that it runs

A call ends within --minutes and begins nothing that would not: what a step takes is learned from
those before it. Results are written after each step, so a call may be killed at any time; the same
call, or another, goes on where it stopped, on another machine too when the folder of the results is
brought along. Figures that were made with other code of flatout are kept, with their commit; only
what failed is tried again. A call whose steps are done goes on with those of the others.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import psutil
    import throughput
    from contact_pack import MANIFEST, check_nanogpt, commit_of, instructions, pack
    from contact_plan import (
        CALLS,
        LADDER,
        Estimates,
        Step,
        guess_s,
        is_profiled,
        missing,
        plan_lines,
        steps,
    )
    from contact_report import near_targets, summary
    from contact_results import Results
    from contact_steps import environment, gpu_tests, profile_steps
    from throughput_ladder import ladder

    from flatout.config.schema import RunConfig
    from flatout.files import PART
    from flatout.hardware import probe
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The package {error.name} is not here. Fix: install flatout, or bring the folder that --pack fills and set PYTHONPATH as in docs/gpu.md."
    ) from None

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".kit-cache"
"""Where compiled kernels lie: a machine that is still there at the next call finds them."""
MINUTES = 9.0
END_S = 8.0
"""What the end of a call takes."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the command."""
    began_s = time.monotonic() - (
        time.time() - psutil.Process().create_time()
    )  # importing torch took its share of the call
    arguments = parser().parse_args(words)
    if arguments.plan:
        print(
            "\n".join(
                [
                    *plan_lines(lambda entry: entry.rows, throughput.is_asked),
                    "",
                    *instructions(arguments.kit or Path(".kit")),
                ]
            )
        )
    elif arguments.pack:
        print(
            "\n".join(
                pack(
                    arguments.pack,
                    nanogpt=arguments.nanogpt,
                    commit=arguments.commit,
                    code=throughput.code_digest(ours=True),
                )
            )
        )
    elif arguments.call is None or arguments.results is None:
        raise SystemExit("Give --plan, --pack DIR, or --call with --results DIR.")
    else:
        run_call(arguments, began_s)


def parser() -> argparse.ArgumentParser:
    """Return what the command takes."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--plan", action="store_true", help="print the calls and what they do")
    made.add_argument(
        "--pack", type=Path, metavar="DIR", help="collect in DIR what a bare machine lacks"
    )
    made.add_argument(
        "--call",
        choices=[*map(str, CALLS), "next"],
        help="run one call; next is the first whose steps are not all done",
    )
    made.add_argument(
        "--results",
        type=Path,
        help="folder of the results, read and written; at most seven small files",
    )
    made.add_argument(
        "--seed",
        type=Path,
        metavar="DIR",
        help="results of calls before: copied to --results where that has none",
    )
    made.add_argument(
        "--kit",
        type=Path,
        help="the folder that --pack filled: its nanoGPT and its commit are used",
    )
    made.add_argument(
        "--minutes", type=float, default=MINUTES, help="the call ends within them (9)"
    )
    made.add_argument("--nanogpt", type=Path, help="a folder with nanoGPT's model.py")
    made.add_argument(
        "--commit", help="what to write down as the commit, where there is no repository"
    )
    made.add_argument(
        "--only",
        default="*",
        help="of the measurements, those that --only of throughput.py would name",
    )
    made.add_argument("--tiny", action="store_true", help="toy shapes on the CPU")
    return made


def run_call(arguments: argparse.Namespace, began_s: float) -> None:
    """Run one call and print the table."""
    if not arguments.tiny and not probe().gpus:
        raise SystemExit(
            "It measures a GPU, and there is none here. --tiny runs every step at toy shapes on the CPU."
        )
    check(arguments)
    with suppress(OSError):  # torch and Triton have places of their own
        CACHE.mkdir(exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE / "triton"))
    with held(arguments.results), tempfile.TemporaryDirectory(prefix="flatout-contact-") as scratch:
        if arguments.seed and arguments.seed.is_dir():
            sow(arguments.seed, arguments.results)
        contact = Contact(
            session(arguments, Path(scratch)), Results(arguments.results), arguments, began_s
        )
        number = contact.next_call() if arguments.call == "next" else int(arguments.call)
        contact.run(number)
        print("\n".join(contact.table(number)))


def check(arguments: argparse.Namespace) -> None:
    """Check what a call was given, before it takes any of its time.

    Raises: SystemExit.
    """
    if arguments.kit and not (arguments.kit / MANIFEST).is_file():
        raise SystemExit(
            f"{arguments.kit} is no folder that --pack filled: it has no {MANIFEST}. Fix: take that folder along, or leave --kit out."
        )
    if arguments.nanogpt:
        check_nanogpt(arguments.nanogpt)
    if not any(throughput.is_asked(entry, arguments.only) for entry in throughput.ENTRIES):
        raise SystemExit(
            f"--only {arguments.only} names nothing. Fix: python benchmarks/throughput.py --list names the works and their entries."
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder of the results for this call; the system lets go of it when the process ends,
    however it ends.

    Raises: SystemExit when another call holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise SystemExit(
            f"{folder} cannot be written: {why}. Fix: give another folder with --results."
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(
            error, BlockingIOError
        ):  # any other error is a file system's that has no locks
            os.close(handle)
            raise SystemExit(
                f"Another call writes to {folder}. Fix: wait until it has ended, or give another folder with --results."
            ) from None
    try:
        yield
    finally:
        os.close(handle)


def sow(seed: Path, folder: Path) -> None:
    """Copy the results of calls before, each file whole or not at all, to where there are none; a
    copy that was cut short is completed.
    """
    for path in sorted(seed.iterdir()):
        if path.is_file() and not path.name.endswith(PART) and not (folder / path.name).exists():
            copy = folder / f"{path.name}{PART}"
            shutil.copyfile(path, copy)
            copy.replace(folder / path.name)


def session(arguments: argparse.Namespace, scratch: Path) -> throughput.Session:
    """Return what measures an entry: throughput.py's own, with the peer and the commit that were
    packed.
    """
    packed = arguments.kit / "nanoGPT" if arguments.kit else None
    nanogpt = arguments.nanogpt or (packed if packed and packed.is_dir() else None)
    commit = arguments.commit or commit_of(arguments.kit, code=throughput.code_digest(ours=True))
    words = ["--out", str(arguments.results), *(["--tiny"] if arguments.tiny else [])]
    words += [
        *(["--nanogpt", str(nanogpt)] if nanogpt else []),
        *(["--commit", commit] if commit else []),
    ]
    return throughput.Session(
        throughput.parser().parse_args(words), probe(), arguments.results, scratch
    )


@dataclass
class Contact:
    """One call at work."""

    session: throughput.Session
    results: Results
    arguments: argparse.Namespace
    began_s: float
    clock: Callable[[], float] = time.monotonic
    tried: set[str] = field(default_factory=set)
    """What this call has begun: nothing is begun twice."""
    waiting: dict[str, Step] = field(default_factory=dict)
    """What there was no time for."""
    configs: dict[tuple[str, str], RunConfig | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found = self.session.read()
        self.identity = self.session.identity(throughput.ENTRIES[0])
        held = {(row["device"], row["torch"]) for row in self.found.rows} - {
            (self.identity["device"], self.identity["torch"])
        }
        if held:
            what = " with torch ".join(held.pop())
            raise SystemExit(
                f"{self.results.folder} holds figures of {what}. Fix: give another folder with --results."
            )
        self.works = {
            work.name: throughput.shape(work, tiny=self.session.arguments.tiny)
            for work in throughput.WORKS
        }

    def run(self, number: int) -> None:
        """Do what is due, what matters most first, as far as the time goes."""
        for pattern in missing(CALLS[number], throughput.is_asked):
            self.session.say(f"{pattern}: there is no such entry. The call goes on without it.")
        for step in self.order(number):
            if step.name in self.tried or self.is_done(step) or not self.can_be_done(step):
                continue
            if self.remaining_s() < self.estimates.needed_s(step):
                self.waiting[step.name] = step
                continue
            self.tried.add(step.name)
            self.waiting.pop(step.name, None)
            self.do(step, number)
        self.results.end_call(number, self.clock() - self.began_s)
        self.session.write(self.found)

    def order(self, number: int) -> Iterator[Step]:
        """Yield the steps of a call, then what the other calls left, then what was stopped before."""
        plans = {
            each: steps(CALLS[each], self.session.batches, throughput.is_asked)
            for each in (number, *(n for n in CALLS if n != number))
        }
        stopped: list[Step] = []
        for step in self.planned(plans, number):
            if self.was_stopped(step):
                stopped.append(step)
            else:
                yield step
        yield from stopped

    def planned(
        self, plans: dict[int, tuple[list[Step], list[Step]]], number: int
    ) -> Iterator[Step]:
        """Yield the steps in order, whether they are done or not."""
        yield from plans[number][0]
        if CALLS[number].repeats:
            yield from self.repeats()
        if CALLS[number].ladder:
            yield from (step for core, _ in plans.values() for step in core)
            yield LADDER
        yield from plans[number][1]
        yield from (step for core, _ in plans.values() for step in core)
        yield from (step for _, later in plans.values() for step in later)

    def repeats(self) -> Iterator[Step]:
        """Yield two more measurements of what lies near a target, and of what it is compared with."""
        for again in (1, 2):
            for entry, rows in near_targets(self.found):
                yield Step("measure", entry, rows, again)

    def do(self, step: Step, number: int) -> None:
        """Do one step and write down what came of it."""
        self.results.begin(step.name, number)
        began_s = self.clock()
        own_limit_s, left_s = self.estimates.limit_s(step), self.remaining_s()
        limit_s = min(own_limit_s, left_s)
        self.session.say(
            f"{step.name}: expected to take {self.estimates.expected_s(step):.0f} s; {left_s:.0f} s are left."
        )
        status = "ok"
        if step.entry is not None:
            status = self.measure(step, limit_s)
        elif step.kind == "ladder":
            status = self.climb(limit_s)
        else:
            does = environment if step.kind == "environment" else gpu_tests
            self.results.keep(
                step.kind,
                {
                    **does(limit_s, tiny=self.session.arguments.tiny),
                    **self.identity,
                    "commit": self.session.arguments.commit,
                },
            )
        entry = [step.entry.work, step.entry.name] if step.entry else None
        spent = {
            "step": step.name,
            "entry": entry,
            "guess_s": guess_s(step),
            "seconds": round(self.clock() - began_s, 1),
            "status": status,
        }
        spent["cut"] = status == "timed-out" and left_s < own_limit_s
        self.results.end(spent)

    def climb(self, limit_s: float) -> str:
        """Measure the ladder; a failure is written down."""
        try:
            ladder(
                self.results.folder,
                self.session.scratch,
                minutes=limit_s / 60,
                rounds=None,
                tiny=self.session.arguments.tiny,
            )
        except SystemExit as error:  # that is how it says what went wrong
            self.session.say(f"The ladder failed: {error}")
            self.results.keep(
                "ladder",
                {"status": "failed", "failed": [str(error)[-600:]], "code": self.identity["code"]},
            )
            return "failed"
        self.results.keep("ladder", {"status": "ok", "code": self.identity["code"]})
        return "ok"

    def measure(self, step: Step, limit_s: float) -> str:
        """Measure an entry, or only profile it; return the status of the row."""
        assert step.entry is not None
        before = self.rows(step)
        profiled = step.kind == "profile" or (
            is_profiled(step) and not before and not self.results.profile(step.entry)
        )
        ends_call = limit_s < self.estimates.limit_s(step)
        row = self.row(step, limit_s, profiled=profiled)
        if (
            profiled
            and step.kind == "measure"
            and row["status"] == "failed"
            and self.remaining_s() >= self.estimates.needed_s(step)
        ):
            self.session.say(
                f"{step.name} failed while it was to be profiled ({row['reason']}); it is measured without."
            )
            row = self.row(step, min(limit_s, self.remaining_s()), profiled=False)
        if row["status"] == "timed-out":
            why = "the call's time was up" if ends_call else "much more than expected"
            row["reason"] = (
                f"It was stopped after {row['process_s']:.0f} s: {why}. A later call tries it again if there is time."
            )
        if step.kind == "measure":
            self.found.drop(before)
            self.session.keep(row, self.found)
        return str(row["status"])

    def row(self, step: Step, limit_s: float, *, profiled: bool) -> dict[str, Any]:
        """Measure and return the row; a profile is written down."""
        assert step.entry is not None
        config = self.config(step)
        assert config is not None
        more = (
            {"profile_steps": profile_steps(tiny=self.session.arguments.tiny)} if profiled else {}
        )
        row = self.session.row(step.entry, step.rows, step.number, config, limit_s, **more)
        profile = row.pop("profile", {"failed": row["reason"]})
        if profiled:
            row["profiled"] = True
            about = {
                "code": row["code"],
                "commit": row["commit"],
                "rows": row["rows"],
                "alone": step.kind == "profile",
            }
            self.results.keep_profile(step.entry, profile | about)
        return row

    def rows(self, step: Step) -> list[dict[str, Any]]:
        """Return the rows of what a step measures."""
        assert step.entry is not None
        return [
            row
            for row in self.found.of(step.entry)
            if (row["round"], row["rows"]) == (step.number, step.rows)
        ]

    def is_done(self, step: Step) -> bool:
        """Say whether nothing is left to do of a step; what failed with other code, or while it was
        profiled, is tried again.
        """
        if step.kind == "ladder":
            held = self.results.of("ladder")
            return bool(held) and (held["status"] == "ok" or held["code"] == self.identity["code"])
        if step.entry is None:
            held = self.results.of(step.kind)
            is_bad = bool(held.get("failed")) or held.get("status") != "ok"
            return (
                bool(held)
                and held.get("device") == self.identity["device"]
                and not (is_bad and held.get("code") != self.identity["code"])
            )
        if step.kind == "profile":
            profile = self.results.profile(step.entry)
            is_last_word = (
                profile.get("alone")
                and profile.get("code") == self.session.identity(step.entry)["code"]
            )
            return bool(profile) and bool("failed" not in profile or is_last_word)
        return any(self.stands(row) for row in self.rows(step))

    def stands(self, row: dict[str, Any]) -> bool:
        """Say whether a row is the last word on what it measured."""
        if row["status"] in ("ok", "timed-out"):
            return bool(row["status"] == "ok")
        entry = next(
            entry
            for entry in throughput.ENTRIES
            if (entry.work, entry.name) == (row["work"], row["entry"])
        )
        return row["code"] == self.session.identity(entry)["code"] and not row.get("profiled")

    def was_stopped(self, step: Step) -> bool:
        """Say whether a step was stopped before because it took too long, and not because its call
        was over.
        """
        ends = [row for row in self.results.spent if row["step"] == step.name]
        return bool(ends) and ends[-1]["status"] == "timed-out" and not ends[-1]["cut"]

    def can_be_done(self, step: Step) -> bool:
        """Say whether an entry can be measured here; if not, that has been said."""
        if step.entry is None:
            return True
        return (
            throughput.is_asked(step.entry, self.arguments.only) and self.config(step) is not None
        )

    def config(self, step: Step) -> RunConfig | None:
        """Return the configuration of an entry, None for one that cannot be measured here."""
        assert step.entry is not None
        key = (step.entry.work, step.entry.name)
        if key not in self.configs:
            self.configs[key] = self.session.configured(step.entry, self.works[step.entry.work])
        return self.configs[key]

    @property
    def estimates(self) -> Estimates:
        """What steps take, as far as is known now."""
        return Estimates(self.results.spent)

    def remaining_s(self) -> float:
        """Return the seconds that the call has left for its steps."""
        return 60 * float(self.arguments.minutes) - END_S - (self.clock() - self.began_s)

    def next_call(self) -> int:
        """Return the first call that has steps left that matter, the last when none has."""
        for number, call in CALLS.items():
            core, _ = steps(call, self.session.batches, throughput.is_asked)
            if any(
                not self.is_done(step) and not self.was_stopped(step) and self.can_be_done(step)
                for step in core
            ):
                return number
        return max(CALLS)

    def table(self, number: int) -> list[str]:
        """Return what the call came to, and write it beside the figures."""
        core, _ = steps(CALLS[number], self.session.batches, throughput.is_asked)
        left = [name for name in self.waiting if name in {step.name for step in core}]
        lines = summary(self.found, self.results, call=number, left=left)
        self.results.write_table(lines)
        return lines


if __name__ == "__main__":
    main()
