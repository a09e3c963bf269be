"""A case of bad input, the small world it happens in, and what the command line answers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flatout import cli, hardware

RECIPE = """\
# A tiny model.
model: {num_layers: 1, d_model: 16, num_heads: 1}
data: {path: data/book, seq_len: 32}
batch: {tokens_per_step: 128, rows_per_device: 4}
train: {steps: 2, device: cpu}
speedups: auto,-compile
"""


@dataclass
class World:
    """The folder a case happens in, and ways to spoil it."""

    path: Path
    patch: pytest.MonkeyPatch
    stack: contextlib.ExitStack

    def write(self, name: str, text: str | bytes) -> None:
        """Write a file."""
        place = self.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode() if isinstance(text, str) else text)

    def rows(self) -> None:
        """Prepare another data set, data/rows, of characters."""
        assert ask("prepare book.txt --out data/rows --tokenizer char", self.path).code == 0

    def overwrite(self, name: str, offset: int, data: bytes) -> None:
        """Change some bytes of a file."""
        with (self.path / name).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def protect(self, name: str) -> None:
        """Let nothing be written under a folder, which a permission cannot do to every user."""
        place = self.path / name

        def refused(path: object) -> bool:
            return isinstance(path, str | Path) and place in (place.parent / path).parents

        def guarded(function: Callable, writes: Callable[..., bool]) -> Callable:
            def call(path, *arguments, **named):
                if refused(path) and writes(*arguments, **named):
                    raise PermissionError(13, "Permission denied", str(path))
                return function(path, *arguments, **named)

            return call

        self.patch.setattr(os, "mkdir", guarded(os.mkdir, lambda *_, **__: True))
        self.patch.setattr(io, "open", guarded(io.open, lambda mode="r", *_, **__: "r" not in mode))


def nothing(_world: World) -> None:
    """Spoil nothing: the words alone are wrong."""


@dataclass(frozen=True)
class Case:
    """One thing that a user gets wrong."""

    wrong: str
    """What is wrong, in a few words: the first column of the table."""
    line: str
    """The command line, without the program."""
    names: tuple[str, ...]
    """What the message must name."""
    fix: tuple[str, ...]
    """What the fix must name."""
    spoil: Callable[[World], None] = nothing
    """What is done to the world first."""
    says: str = ""
    """A few words of the progress shown before the error."""
    leaves: tuple[str, ...] = ()
    """Beginnings of paths that may have changed afterwards."""


@dataclass(frozen=True)
class Answer:
    """What the command line answered."""

    code: object
    out: str
    err: str
    changed: list[str]
    """Paths that came, went or changed."""
    what: str
    """The message, with nothing in it that differs from machine to machine."""
    fix: str
    """What it says to do, likewise."""


def make_world(path: Path) -> Path:
    """Write what a user may have: texts, a recipe, a data set, a trained run."""
    path.mkdir()
    world = World(path, pytest.MonkeyPatch(), contextlib.ExitStack())
    world.write("book.txt", "It was a dark and stormy night; the rain fell in torrents. " * 60)
    world.write("rows.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    world.write("my.yaml", RECIPE)
    for line in (
        "prepare book.txt --out data/book --tokenizer byte",
        "train my.yaml --run-dir runs/first",
    ):
        assert ask(line, path).code == 0
    return path


class Answers:
    """Tries each case once."""

    def __init__(self, world: Path, factory: pytest.TempPathFactory) -> None:
        self._world = world
        self._factory = factory
        self._known: dict[str, Answer] = {}

    def __call__(self, case: Case) -> Answer:
        """Return the answer to a case."""
        if case.wrong not in self._known:
            place = self._factory.mktemp("case") / "here"
            shutil.copytree(self._world, place)
            config = place / "runs/first/config.yaml"
            config.write_text(config.read_text().replace(str(self._world), str(place)))
            self._known[case.wrong] = ask(case.line, place, case.spoil)
        return self._known[case.wrong]


def ask(line: str, place: Path, spoil: Callable[[World], None] = nothing) -> Answer:
    """Run a command in a folder, on a machine with fixed hardware, and return its answer."""
    name, *words = shlex.split(line)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        _plain_machine(patch, place)
        spoil(World(place, patch, stack))
        before = contents(place)
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as stopped,
        ):
            cli.main([name, "--json", *words])
        after = contents(place)
    changed = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and not _is_lock(name, before)
    )
    said = json.loads(out.getvalue().splitlines()[-1]) if out.getvalue() else {}
    return Answer(
        stopped.value.code,
        out.getvalue(),
        err.getvalue(),
        changed,
        *(plain(said.get(key, ""), place) for key in ("error", "fix")),
    )


def _plain_machine(patch: pytest.MonkeyPatch, place: Path) -> None:
    """Hide what differs between machines: their CPU, their GPUs, what else they do."""
    import psutil
    import torch

    from flatout.terminal import Terminal

    patch.chdir(place)
    patch.setitem(
        Terminal.__init__.__kwdefaults__, "clock", lambda: 0.0
    )  # a slow machine has no more progress lines than a fast one
    patch.setenv("HOME", str(place))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        patch.delenv(name, raising=False)
    patch.setattr(hardware, "_cpu_name", lambda: "a CPU")
    patch.setattr(hardware, "usable_cores", lambda: 2)
    patch.setattr(hardware, "_gpus", lambda: ())
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(psutil, "cpu_percent", lambda **_: 0.0)


def contents(place: Path) -> dict[str, bytes | None]:
    """Return every file and folder under a folder."""
    return {
        path.relative_to(place).as_posix(): path.read_bytes() if path.is_file() else None
        for path in place.rglob("*")
    }


def _is_lock(name: str, before: dict[str, bytes | None]) -> bool:
    """Say whether this is a run's lock that was there before: it names the last process that held
    it.
    """
    return name in before and name.endswith("/lock")


def plain(text: str, place: Path) -> str:
    """Return a message without what differs from place to place."""
    text = text.replace(f"{place}/", "").replace(str(place), ".")
    text = re.sub(r"process \d+ on \S+(?=\.)", "process 4711 on this machine", text)
    return re.sub(r"kill \d+", "kill 4711", text)


def row(case: Case, answer: Answer) -> str:
    """Return a case as a line of the table."""
    return f"| {_cell(case.wrong)} | {_cell(answer.what)} | {_cell(answer.fix)} |"


def _cell(text: str) -> str:
    """Return text as Markdown shows it; lists that grow with flatout are shortened."""
    text = re.sub(r"(Known|data sets): [^.]+\.$", r"\1: ...", text)
    text = re.sub(r"((?:[\w./-]+, ){2})(?:[\w./-]+, )+[\w./-]+\.(?= |$)", r"\1...", text)
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([\\*_<\[])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces).replace("|", "\\|")
