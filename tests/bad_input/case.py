"""Run a command line with bad input in a small directory, and return its answer."""

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

from flatout.cli import main as cli
from flatout.hardware import machine as hardware

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
    """The directory that a case runs in, with functions to change it."""

    path: Path
    patch: pytest.MonkeyPatch
    stack: contextlib.ExitStack

    def write(self, name: str, text: str | bytes) -> None:
        """Write a file."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    def rows(self) -> None:
        """Prepare another dataset, data/rows, with characters as tokens."""
        assert run_command("prepare book.txt --out data/rows --tokenizer char", self.path).code == 0

    def overwrite(self, name: str, offset: int, data: bytes) -> None:
        """Change some bytes of a file."""
        with (self.path / name).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def protect(self, name: str) -> None:
        """Reject to write in a directory; file permissions do not apply to every user."""
        folder = self.path / name

        def refused(path: object) -> bool:
            return isinstance(path, str | Path) and folder in (folder.parent / path).parents

        def guarded(function: Callable, writes: Callable[..., bool]) -> Callable:
            def call(path, *arguments, **named):
                if refused(path) and writes(*arguments, **named):
                    raise PermissionError(13, "Permission denied", str(path))
                return function(path, *arguments, **named)

            return call

        self.patch.setattr(os, "mkdir", guarded(os.mkdir, lambda *_, **__: True))
        self.patch.setattr(io, "open", guarded(io.open, lambda mode="r", *_, **__: "r" not in mode))


def nothing(_world: World) -> None:
    """Change nothing, because only the command line is wrong."""


@dataclass(frozen=True)
class Case:
    """One mistake of a user."""

    wrong: str
    """The mistake in a few words: the first column of the table."""
    line: str
    """The command line without `flatout`."""
    names: tuple[str, ...]
    """Text that the message must contain."""
    fix: tuple[str, ...]
    """Text that the fix must contain."""
    spoil: Callable[[World], None] = nothing
    """Changes the world before the command runs."""
    progress: str = ""
    """Text of the progress shown before the error."""
    may_change: tuple[str, ...] = ()
    """Prefixes of paths that the command may change."""


def case(
    wrong: str,
    line: str,
    names: str | tuple[str, ...],
    fix: str | tuple[str, ...],
    spoil: Callable[[World], None] = nothing,
    **more: object,
) -> Case:
    """Return a case. A single text need not be a tuple."""
    names, fix = ((texts,) if isinstance(texts, str) else texts for texts in (names, fix))
    return Case(wrong, line, names, fix, spoil, **more)


def written(name: str, text: str | bytes) -> Callable[[World], None]:
    """Return a function that writes a file."""
    return lambda world: world.write(name, text)


def table(text: str) -> list[Case]:
    """Return cases in which only the command line is wrong.

    Each has a line with the mistake, and indented ones with the command line and the texts of
    message and fix: `a | b -> c`.
    """
    cases = []
    for block in re.split(r"\n(?! )", text.strip()):
        wrong, line, *answer = map(str.strip, block.split("\n"))
        names, fix = (tuple(each.split(" | ")) for each in " ".join(answer).split(" -> "))
        cases.append(Case(wrong, line, names, fix))
    return cases


@dataclass(frozen=True)
class Answer:
    """The result of a command line."""

    code: object
    out: str
    err: str
    changed: list[str]
    """Paths that were added, removed or changed."""
    what: str
    """The message, without anything that depends on the machine."""
    fix: str
    """The fix, without anything that depends on the machine."""


def make_world(path: Path) -> Path:
    """Write the files of a typical user: texts, a recipe, a dataset and a trained run."""
    path.mkdir()
    world = World(path, pytest.MonkeyPatch(), contextlib.ExitStack())
    world.write("book.txt", "It was a dark and stormy night; the rain fell in torrents. " * 60)
    world.write("rows.jsonl", '{"text": "one"}\n{"text": "two"}\n')
    world.write("my.yaml", RECIPE)
    for line in (
        "prepare book.txt --out data/book --tokenizer byte",
        "train my.yaml --run-dir runs/first",
    ):
        assert run_command(line, path).code == 0
    return path


class Answers:
    """Runs each case once, in a copy of the world."""

    def __init__(self, world: Path, factory: pytest.TempPathFactory) -> None:
        self._world = world
        self._factory = factory
        self._known: dict[str, Answer] = {}

    def __call__(self, case: Case) -> Answer:
        """Return the answer to a case."""
        if case.wrong not in self._known:
            folder = self._factory.mktemp("case") / "here"
            shutil.copytree(self._world, folder)
            config = folder / "runs/first/config.yaml"
            config.write_text(config.read_text().replace(str(self._world), str(folder)))
            self._known[case.wrong] = run_command(case.line, folder, case.spoil)
        return self._known[case.wrong]


def run_command(line: str, folder: Path, spoil: Callable[[World], None] = nothing) -> Answer:
    """Run a command in a directory, on a machine with fixed hardware, and return its answer."""
    name, *words = shlex.split(line)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        _plain_machine(patch, folder)
        spoil(World(folder, patch, stack))
        before = contents(folder)
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as stopped,
        ):
            cli.main([name, "--json", *words])
        after = contents(folder)
    changed = sorted(
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and not _is_of_process(name, before)
    )
    result = json.loads(out.getvalue().splitlines()[-1]) if out.getvalue() else {}
    return Answer(
        stopped.value.code,
        out.getvalue(),
        err.getvalue(),
        changed,
        *(plain(result.get(key, ""), folder) for key in ("error", "fix")),
    )


def _plain_machine(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Hide what differs between machines: CPU, GPUs, environment and load."""
    import psutil
    import torch

    from flatout.cli.terminal import Terminal

    patch.chdir(folder)
    # The number of progress lines must not depend on the machine's speed.
    patch.setitem(Terminal.__init__.__kwdefaults__, "clock", lambda: 0.0)
    patch.setenv("HOME", str(folder))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        patch.delenv(name, raising=False)
    patch.setattr(hardware, "_cpu_name", lambda: "a CPU")
    patch.setattr(hardware, "_multiplies_bf16", lambda: False)
    patch.setattr(hardware, "usable_cores", lambda: 2)
    patch.setattr(hardware, "_gpus", lambda: ())
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(psutil, "cpu_percent", lambda **_: 0.0)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return the files and directories in a directory, with the files' contents."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def _is_of_process(name: str, before: dict[str, bytes | None]) -> bool:
    """Return whether a file of an existing run is about its last process: its lock or its end."""
    return name in before and name.endswith(("/lock", "/exit_code"))


def plain(text: str, folder: Path) -> str:
    """Return a message without absolute paths and process numbers."""
    text = text.replace(f"{folder}/", "").replace(str(folder), ".")
    text = re.sub(r"process \d+ on \S+(?=\.)", "process 4711 on this machine", text)
    return re.sub(r"kill \d+", "kill 4711", text)


def row(case: Case, answer: Answer) -> str:
    """Return a case as a line of the table."""
    return f"| {_cell(case.wrong)} | {_cell(answer.what)} | {_cell(answer.fix)} |"


def _cell(text: str) -> str:
    """Return text escaped for Markdown, with long lists shortened."""
    text = re.sub(r"(Known|datasets): [^.]+\.$", r"\1: ...", text)
    text = re.sub(r"((?:[\w./-]+, ){2})(?:[\w./-]+, )+[\w./-]+\.(?= |$)", r"\1...", text)
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([\\*_<\[])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces).replace("|", "\\|")
