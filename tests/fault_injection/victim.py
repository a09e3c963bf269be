"""A small training run to inject faults into, and what is wrong with it afterwards."""

import json
import shutil
import socket
from collections import Counter
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import yaml
from children import Child, Children, Ended, wait_until

from flatout.errors import FlatoutError
from flatout.storage.json_io import LineReader
from flatout.training.checkpoint import catalog

SPEEDUPS = {
    "loop": "auto,-compile,-async-checkpoints",
    "beside": "auto,-compile,+async-checkpoints",
}
"""Saves in the loop, and beside training."""
KEPT = ("tokens", "train_loss", "val_loss", "weights_sha256")
"""What a fault must not change in the result of a run."""
ONCE = ("evaluation", "end")
"""Events that a run has once, at its last step."""


class Victim:
    """A recipe that draws random numbers, with its result when nothing happens to it."""

    def __init__(self, children: Children, folder: Path, settings: dict, *, ranks: int = 1) -> None:
        self.children = children
        self.ranks = ranks
        self.folder = folder
        self.settings = settings
        self.steps = settings["train.steps"]
        self.recipe = folder / "victim.yaml"
        sections: dict = {}
        for key, value in settings.items():
            section, _, name = key.partition(".")
            if name:
                sections.setdefault(section, {})[name] = value
            else:
                sections[key] = value
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe.write_text(yaml.safe_dump(sections))

    def words(self, run: Path, *more) -> list:
        """Return the command that trains in a run directory."""
        return ["train", self.recipe, *more, "--run-dir", run, "--json"]

    def start(self, run: Path, *more, stopped: bool = False) -> list[Child]:
        """Start to train, with one process per rank."""
        words, port = self.words(run, *more), str(free_port())
        return [
            self.children.start(
                *words,
                stopped=stopped,
                environment={
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                if self.ranks > 1
                else None,
            )
            for rank in range(self.ranks)
        ]

    def train(self, run: Path, *more) -> Ended:
        """Train to the end, and return how the first rank ended."""
        ended = [child.wait() for child in self.start(run, *more)]
        return ended[0]

    @cached_property
    def whole(self) -> Path:
        """The run directory of the run that nothing happened to, with every checkpoint."""
        run = self.folder / "whole"
        ended = self.train(run, "checkpoint.keep=all")
        assert ended.code == 0, ended.err
        self.result = {key: ended.result[key] for key in KEPT}
        return run

    @cached_property
    def halfway(self) -> Path:
        """The run directory of a run that was killed in its middle."""
        run = self.folder / "halfway"
        child = self.children.start(*self.words(run))
        middle = catalog.checkpoint_path(run, self.steps // 2)
        assert wait_until(middle.is_dir, child=child), "the run ended before its middle"
        assert child.kill().code < 0, "the run was faster than the kill"
        return run

    def copy(self, run: Path, to: Path) -> Path:
        """Return a copy of a run directory in place of an earlier one."""
        shutil.rmtree(to, ignore_errors=True)
        return Path(shutil.copytree(run, to, symlinks=True))

    def digests(self, checkpoint: Path) -> dict[str, str]:
        """Return the recorded digests of the weights and the optimizer's tensors."""
        files = catalog.read_manifest(checkpoint).files
        return {one.name: one.sha256 for one in files if "safetensors" in one.name}

    def lost(self, run: Path, least: int) -> list[str]:
        """Return what is wrong with the newest checkpoint of a run that saved step `least`.

        The leftovers of a killed save are removed, or put back, as a resume does first.
        """
        try:
            catalog.remove_leftovers(run)
            newest = catalog.latest(run)
        except FlatoutError as error:
            return [str(error)]
        step = catalog.step_of(newest) if newest else 0
        if step < least:
            return [f"step {least} was saved, and {step} is the newest"]
        same = self.whole / "checkpoints" / f"step-{step}"
        if newest and self.digests(newest) != self.digests(same):
            return [f"{newest.name} differs from that of the run without faults"]
        return []

    def unequal(self, run: Path, ended: Ended) -> list[str]:
        """Return how a run's end differs from that of the run without faults, bit by bit."""
        whole = self.whole
        if ended.code:
            return [f"ended in {ended.code}: {ended.err[-2000:]}"]
        found = {key: ended.result[key] for key in KEPT}
        problems = [] if found == self.result else [f"{found} instead of {self.result}"]
        last = [folder / "checkpoints" / f"step-{self.steps}" for folder in (run, whole)]
        if self.digests(last[0]) != self.digests(last[1]):
            problems.append("the tensors of the last checkpoint differ")
        states = [json.loads((path / catalog.STATE).read_text()) for path in last]
        for state in states:
            state["values"].pop("elapsed_s")
        for name, value in states[1]["values"].items():
            if states[0]["values"].get(name) != value:
                found = states[0]["values"].get(name)
                problems.append(f"{name} in the last checkpoint is {found} instead of {value}")
        return problems

    def end(self, run: Path, *more) -> list[str]:
        """Run the same command again, and return how its end differs."""
        return self.unequal(run, self.train(run, *more))

    def wrong_lines(self, run: Path) -> dict[str, int]:
        """Return how many records and events a run lacks, has twice, or has with other losses.

        Which ones it must have follows from the settings, their losses from the run without
        faults.
        """
        every = {
            "train/loss": self.settings["log.every"],
            "val/loss": self.settings["train.eval_every"],
        }
        wanted = Counter(
            {
                (kind, step): 1
                for kind, steps in every.items()
                for step in range(1, self.steps + 1)
                if step % steps == 0 or step == self.steps
            }
            | {(kind, self.steps): 1 for kind in ONCE}
        )
        (found, losses), (_, right) = logged(run), logged(self.whole)
        assert right.keys() == wanted.keys(), "the run without faults is complete"
        return {
            "missing": (wanted - found).total(),
            "doubled": (found - wanted).total(),
            "unequal": sum(losses[line] != right[line] for line in losses.keys() & right.keys()),
        }


def logged(run: Path) -> tuple[Counter, dict]:
    """Return how often a run's files have a record or an event of ONCE, and the loss of each.

    Both are by kind and step.
    """
    counts: Counter = Counter()
    losses: dict = {}
    lines = [*LineReader(run / "metrics.jsonl").read(), *LineReader(run / "events.jsonl").read()]
    for line in lines:
        for kind in ("train/loss", "val/loss", line.get("event")):
            if kind in line or kind in ONCE:
                counts[kind, line["step"]] += 1
                losses[kind, line["step"]] = line.get(kind, line.get("loss"))
    return counts, losses


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def saved_step(run: Path, kind: str = "save") -> int:
    """Return the last step that the run's events report as saved; 0 without one.

    With `kind="upload"`, the last that they report as uploaded.
    """
    steps = [0]
    if (run / "events.jsonl").exists():
        for line in (run / "events.jsonl").read_bytes().split(b"\n")[:-1]:
            with suppress(ValueError):  # a line that a full disk cut short
                event = json.loads(line)
                steps.append(event["step"] if event["event"] == kind else 0)
    return max(steps)


def saving(run: Path) -> set[str]:
    """Return the names of unfinished saves and deletions."""
    return {path.name for path in (run / "checkpoints").glob("*.part-*")}
