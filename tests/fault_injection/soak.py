"""Kill and resume a training run for an hour, and watch its memory and its open files.

    python tests/fault_injection/soak.py --minutes 60
    python tests/fault_injection/soak.py --kills 100

`make soak` runs the first. With --kills, short runs are killed that often instead: as they start,
between steps, in a save, during an upload, and after their last step; some lose
their directory too. Each run must end with the same bits, every record exactly once, and one event
of each kind.

What the first does: First a run trains without a kill, evaluation, sample and report at its end
included. Its memory and its number of open files must not exceed those of the same run of a few
steps. Then the same run is killed at random moments and resumed, over and over, until the time
is up: no saved step may be lost, every checkpoint must equal that of the first run, and each run
must end with the same bits. The exit code is 1 when something is wrong.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
from children import Child, Children, wait_until
from victim import ONCE, SPEEDUPS, Victim, logged, saved_step, saving

from flatout.storage.json_io import LineReader
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.layout import EVENTS

STEPS_PER_MINUTE = 800
"""Steps of the run per minute of the soak; a fifth of the time or so, on two cores."""
EVERY_S = 0.05
SHORT_STEPS = 80
GROWTH_MIB, MORE_FILES = 48.0, 4
"""How much more memory, and open files, than the short run the long one may have at any time."""
WORDS = ("the", "run", "loss", "token", "step", "model", "train", "fast", "graph", "weight")


def watch(child: Child, seconds: float) -> list[tuple[float, int]]:
    """Return the memory in MiB and the open files of a child, until it ends or the time is up."""
    found = []
    give_up = time.monotonic() + seconds
    with suppress(psutil.Error):
        process = psutil.Process(child.pid)
        while child.runs() and time.monotonic() < give_up:
            found.append((process.memory_info().rss / 2**20, process.num_fds()))
            time.sleep(min(EVERY_S, seconds / 10))
    return found


def grown(short: list[tuple[float, int]], seen: list[tuple[float, int]]) -> list[str]:
    """Return what a long run had more of than a short one, beyond its bound."""
    problems = []
    for place, limit, name in ((0, GROWTH_MIB, "MiB of memory"), (1, MORE_FILES, "open files")):
        before, after = max(one[place] for one in short), max(one[place] for one in seen)
        if after > before + limit:
            problems.append(f"{before:,.0f} {name} became {after:,.0f}")
    return problems


def make_victim(
    folder: Path, steps: int, *, eval_every: int = 100, log_every: int = 1, save_every: int = 40
) -> Victim:
    """Return the run to kill, on a dataset of random words."""
    children, draw = Children(folder), random.Random(0)
    (folder / "words.txt").write_text(" ".join(draw.choices(WORDS, k=20_000)))
    children.warm_up(
        *("prepare", folder / "words.txt", "--out", folder / "data", "--split", "tail 0.1"),
        *("--tokenizer", "byte", "--workers", 1),
    )
    settings = {
        "model.num_layers": 2,
        "model.d_model": 32,
        "model.num_heads": 2,
        "model.dropout": 0.1,
        "data.path": str(folder / "data"),
        "data.seq_len": 16,
        "batch.tokens_per_step": 128,
        "batch.rows_per_device": 4,
        "optim.lr": 1e-2,
        "train.steps": steps,
        "train.device": "cpu",
        "train.precision": "fp32",
        "train.eval_every": eval_every,
        "train.eval_tokens": 128,
        "log.every": log_every,
        "checkpoint.every_steps": save_every,
        "checkpoint.keep": 3,
        "checkpoint.best": False,
        "speedups": SPEEDUPS["beside"],
    }
    warm = settings | {"train.steps": 2}
    children.warm_up(*Victim(children, folder / "warm", warm).words(folder / "warm" / "run"))
    return Victim(children, folder / "victim", settings)


def whole(victim: Victim) -> list[str]:
    """Train without a kill; return what is wrong, and keep the run as the one to compare with."""
    few = f"train.steps={SHORT_STEPS}"
    child = victim.children.start(*victim.words(victim.folder / "short", few))
    short = watch(child, float("inf"))
    child.wait()
    child = victim.children.start(*victim.words(victim.folder / "whole", "checkpoint.keep=all"))
    seen = watch(child, float("inf"))
    problems = victim.unequal(victim.whole, child.wait())
    (least, few_files), (most, files) = (map(max, zip(*one, strict=True)) for one in (short, seen))
    print(
        f"{victim.steps} steps without a kill: at most {most:,.0f} MiB and {files} open files, "
        f"{least:,.0f} MiB and {few_files} in a run of {SHORT_STEPS}",
        flush=True,
    )
    return problems + grown(short, seen)


def soak(victim: Victim, seconds: float) -> list[str]:
    """Kill and resume until the time is up, and return what was wrong."""
    draw, kills, ends, most_files = random.Random(0), 0, 0, 0
    run, problems = victim.folder / "run", []
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up and not problems:
        child = victim.children.start(*victim.words(run))
        lives_s = min(draw.expovariate(1 / 4.0), give_up - time.monotonic())
        seen = watch(child, lives_s)
        most_files = max([most_files, *(files for _, files in seen)])
        ended = child.kill()
        if ended.code < 0:
            kills += 1
            problems += victim.lost(run, saved_step(run))
        else:
            ends += 1
            problems += victim.unequal(run, ended)
            shutil.rmtree(run)
    print(f"{kills} kills, {ends} runs to their end, at most {most_files} open files", flush=True)
    if run.exists() and not problems:
        problems += victim.end(run)
    return problems


class Killed:
    """A short run with its remote copy beside it, killed at chosen moments."""

    def __init__(self, victim: Victim, folder: Path, draw: random.Random) -> None:
        self.victim, self.draw = victim, draw
        self.run, self.backup = folder / "run", folder / "backup"
        self.more = [f"checkpoint.upload=file://{self.backup}"]

    def starts(self) -> int:
        """Return how many processes have begun to train."""
        return sum(
            line.get("event") in ("start", "resume")
            for line in LineReader(self.run / EVENTS).read()
        )

    def kill(self, moment: str) -> bool:
        """Start the run, kill it at a moment, and return whether it ran until then."""
        before, pieces = self.starts(), self.pieces()
        child = self.victim.children.start(*self.victim.words(self.run, *self.more))
        part = self.draw.choice(("val/loss", *ONCE, "saved"))
        at = self.draw.randint(1, self.victim.steps)

        def reached() -> bool:
            if self.starts() <= before:
                return False
            if moment in ("save", "upload"):
                return any(
                    ("upload" in name) == (moment == "upload") for name in self.pieces() - pieces
                )
            counts, _ = logged(self.run)
            if moment == "steps":
                return counts["train/loss", at] > 0
            last = catalog.checkpoint_path(self.run, self.victim.steps)
            return last.is_dir() if part == "saved" else counts[part, self.victim.steps] > 0

        if moment == "start":
            time.sleep(self.draw.uniform(0, 0.8))
        else:
            wait_until(reached, child=child)
            time.sleep(self.draw.uniform(0, 0.02))
        return child.kill().code < 0

    def pieces(self) -> set[str]:
        """Return the names of unfinished saves, and of the uploaded files."""
        there = {f"upload {path}" for path in self.backup.rglob("*")}
        return there | {name for name in saving(self.run) if "upload" not in name}


def kill_often(folder: Path, kills: int) -> list[str]:
    """Kill short runs so often, print what happened, and return what was wrong."""
    victim = make_victim(folder, steps=24, eval_every=8, log_every=3, save_every=6)
    draw, found = random.Random(0), Counter()
    moments, problems = Counter(), []
    try:
        assert victim.whole
        while (number := moments.total()) < kills:
            one = Killed(victim, folder / f"run-{found['runs']}", draw)
            for _ in range(min(draw.randint(1, 4), kills - number)):
                moment = draw.choice(("start", "steps", "save", "upload", "end", "end"))
                if not one.kill(moment):
                    break
                moments[moment] += 1
                if lost := victim.lost(one.run, saved_step(one.run)):
                    problems += [f"after a kill ({moment}): {problem}" for problem in lost]
                elif moment == "upload" and draw.random() < 0.5:
                    shutil.rmtree(one.run)
                    found["directories lost"] += 1
            wrong = victim.end(one.run, *one.more)
            found.update({"runs": 1, "runs with other weights": bool(wrong)})
            found.update(lines := victim.wrong_lines(one.run))
            problems += [f"{one.run.parent.name}: {problem}" for problem in wrong]
            problems += [f"{one.run.parent.name}: {lines}"] if any(lines.values()) else []
            shutil.rmtree(one.run.parent)
    finally:
        victim.children.close()
    at = ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items()))
    print(f"{moments.total()} kills ({at}), {found.pop('runs')} runs")
    print(*(f"{count} {what}" for what, count in found.items()), sep=", ", flush=True)
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kills", type=int)
    options = parser.parse_args()
    give_up = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = folder  # the user's cache is neither read nor written
        if options.kills:
            problems = kill_often(Path(folder), options.kills)
            print(*problems or ["no problem"], sep="\n")
            sys.exit(bool(problems))
        steps = max(int(options.minutes * STEPS_PER_MINUTE) // 40 * 40, SHORT_STEPS)
        victim = make_victim(Path(folder), steps)
        try:
            problems = whole(victim)
            problems += soak(victim, max(give_up - time.monotonic(), 5.0))
        finally:
            victim.children.close()
    print(*problems or ["no problem"], sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
