"""The work folder of a prepare, `.OUT.part/` beside OUT: what is done of it, so that a killed one
goes on.

It holds `plan.json`, `tokenizer.json`, `ranges/` (ranges.py), and, while they are joined, `joined/`
(join.py), which becomes OUT. One process owns it at a time. It goes when OUT is whole, and when
there is nothing in it worth going on from.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from flatout.data.prepare.ranges import RECORD, Range, RangeRecord, read_record
from flatout.data.prepare.split_rule import Plan, held_out
from flatout.data.prepare.tokenize import Assignment, Job
from flatout.data.store.manifest import MANIFEST, TOKENIZER
from flatout.errors import DataError, in_shell
from flatout.files import PART, sync, write_first, writing
from flatout.sources import ReadTask

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

PLAN = "plan.json"
_PART_MARK = "part-{}-of-{}"
_PARTS = "parts"
"""Holds in how many parts the work is done, where it is."""
FORMAT_VERSION = 1


class StoredPlan(BaseModel):
    """plan.json: everything that decides what each range holds, less the text itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    source: dict[str, Any]
    """Where the text comes from, with every parameter that shapes the data set."""
    tokenizer: str
    """Digest of tokenizer.json."""
    rule: str
    """The split rule, as the manifest states it."""
    assignment: Assignment
    """How documents are told apart into train and val; those of validation text of its own are not.
    """
    validation_jobs: int = 0
    """How many of the jobs, from the first on, are of validation text of its own."""
    moment: str = ""
    """What changes when a file of the text is written again; nothing in plans that older versions
    made.
    """
    part_bytes: tuple[int, ...]
    """About how much there is to read in each part of the corpus."""
    jobs: tuple[tuple[int, int | None, int | None], ...]
    """Of each part that is packed, from the first on: its first document's number, documents to
    take, bytes of the last.
    """
    ranges: tuple[int, ...]
    """How many of the jobs each range has."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        ranges: Sequence[Range],
        parts: Sequence[ReadTask],
        source: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        moment: str = "",
    ) -> Self:
        """Return what is stored of a plan."""
        return cls(
            source=dict(source),
            tokenizer=tokenizer.digest(),
            rule=plan.rule,
            assignment=plan.assignment,
            validation_jobs=len(plan.jobs) - len(plan.training_jobs),
            moment=moment,
            part_bytes=tuple(part.num_bytes for part in parts),
            jobs=tuple((job.first, job.take, job.last_bytes) for job in plan.jobs),
            ranges=tuple(len(work.jobs) for work in ranges),
        )

    def restored(self, parts: Sequence[ReadTask]) -> tuple[Plan, list[Range]]:
        """Return the plan and the ranges for the very parts it was made of."""
        taken = [Job(part, *stored) for part, stored in zip(parts, self.jobs, strict=False)]
        jobs = [*held_out(parts[: self.validation_jobs]), *taken[self.validation_jobs :]]
        ranges, first = [], 0
        for number, count in enumerate(self.ranges):
            ranges.append(Range(number, tuple(jobs[first : first + count])))
            first += count
        return Plan(tuple(jobs), self.rule, self.assignment), ranges


@dataclass(frozen=True)
class PartOf:
    """Which ranges one of several processes does: every `count`-th, from the `index`-th on, counted
    from 1.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the part that `I/N` names.

        Raises: DataError when it names none.
        """
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise DataError(
                f"--part {text!r} is not a part.",
                fix="Write I/N, for example 2/8: the second of eight.",
            )
        return cls(int(index), int(count))

    def has(self, number: int) -> bool:
        """Say whether a range is in this part."""
        return number % self.count == self.index - 1


class WorkFolder:
    """The work folder of `out`. Use as a context manager, which owns it, or one part of it, if it
    is there; `claim` makes it.

    Raises: DataError when another process owns it, or the disk refuses.
    """

    def __init__(self, out: Path, part: PartOf | None = None) -> None:
        self._part = part
        self.out = out
        self.place = out.resolve()
        """Where the data set will be."""
        self.path = self.place.parent / f".{self.place.name}{PART}"
        """The work folder itself."""
        self.ranges = self.path / "ranges"
        """Where ranges write."""
        self.joined = self.path / "joined"
        """What becomes the data set."""
        self._locks: list[int] = []
        self._parents: list[Path] = []

    def __enter__(self) -> Self:
        with writing(self.out), contextlib.suppress(FileNotFoundError):
            self._own()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._locks and self._part is None:
            self._sweep()
            if not any(self.ranges.glob(f"*{RECORD}")):
                self.clear()
        elif self._locks and self._is_last() and not (self.path / PLAN).exists():
            self._remove()
        self.close()

    def claim(self) -> None:
        """Own the folder from here on, which is made where there is none: others are refused before
        any work is done twice.
        """
        with writing(self.out):
            while not self._locks:
                self._parents += [folder for folder in self.path.parents if not folder.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # its owner removed it just now
                    self._own()

    def _own(self) -> None:
        """Lock the folder, which the system undoes when the process ends however it ends: alone, or
        with those that do other parts.
        """
        if self._part is None:
            self._lock(self.path, fcntl.LOCK_EX)
            self._sweep()
        else:
            self._lock(self.path, fcntl.LOCK_SH)
            self._agree(self._part)
            mark = self.path / _PART_MARK.format(self._part.index, self._part.count)
            os.close(os.open(mark, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666))
            self._lock(mark, fcntl.LOCK_EX)

    def _agree(self, part: PartOf) -> None:
        """Let all parts be of one count.

        Raises: DataError when the work is done in another number of parts.
        """
        write_first(
            self.path / _PARTS, lambda path: path.write_text(f"{part.count}\n", encoding="utf-8")
        )
        count = self._num_parts()
        if count != part.count:
            self.close()
            raise DataError(
                f"--part {part.index}/{part.count}: the work in {self.path} was begun in parts of {count}.",
                fix=f"Give the same N in all parts, here --part I/{count}; or remove that folder, which gives up what is done.",
            )

    def _num_parts(self) -> int | None:
        """Return in how many parts the work is done; None where that is not written down."""
        path = self.path / _PARTS
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        return int(text) if text.isdecimal() else None

    def _is_last(self) -> bool:
        """Say whether no other process works in the folder. The lock is lost when one does."""
        try:
            fcntl.flock(self._locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _lock(self, path: Path, how: int) -> None:
        """Lock a folder or a file.

        Raises: DataError when another process has it, or it is a link; FileNotFoundError when its
                owner removed it just now.
        """
        if path.is_symlink():
            raise DataError(
                f"{path} is a symbolic link: work is not written through links.",
                fix=f"Delete {path}, or choose another --out.",
            )
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._locks.append(lock)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
            owned = os.path.samestat(os.fstat(lock), path.stat())
        except BlockingIOError as error:
            self.close()
            raise DataError(
                f"Another process is writing {self.out}.",
                fix="Wait for it, or choose another --out.",
            ) from error
        except FileNotFoundError:
            owned = False
        if not owned:
            self.close()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _sweep(self) -> None:
        """Take away what is half written."""
        for torn in self.path.rglob(f"*{PART}"):
            torn.unlink()

    def close(self) -> None:
        """Let others have the folder."""
        while self._locks:
            os.close(self._locks.pop())

    def clear(self) -> None:
        """Remove the folder and all that is done of the work; one that others work in stays."""
        if self._locks and self._part is None:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in self._parents:
            with contextlib.suppress(OSError):  # it holds something else by now
                folder.rmdir()

    def give_up(self, error: DataError) -> DataError:
        """Remove the folder, whose text cannot be used, and return the error; where others work in
        it, with what they have to do.
        """
        if self._part is None:
            self.clear()
            return error
        again = f"Other text or options make it another data set: remove the folder {self.path}, which all parts share, and run every part again."
        return DataError(error.what, fix=f"{error.fix} {again}")

    def plan(self) -> StoredPlan | None:
        """Return the plan that was being followed, None when there is none.

        Raises: DataError when it is damaged, or of a newer flatout.
        """
        path = self.path / PLAN
        if not self._locks or not path.is_file():
            return None
        try:
            return StoredPlan.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, ValidationError) as error:
            raise DataError(
                f"{path} cannot be read as the plan of this flatout.",
                fix=f"Remove the folder {self.path}, to begin again.",
            ) from error

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's file."""
        return self.path / TOKENIZER

    def make(self) -> None:
        """Make the folder and own it; where nobody else works in it, with nothing done in it."""
        self.claim()
        with writing(self.out):
            if self._part is None:
                for left in self.path.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            self.ranges.mkdir(exist_ok=True)

    def begin(self, plan: StoredPlan, tokenizer: Tokenizer) -> StoredPlan:
        """Make the folder, write down the plan, and return it; or another process's, which was
        there first.
        """
        self.make()
        with writing(self.out):
            write_first(self.tokenizer, tokenizer.save)
            write_first(
                self.path / PLAN,
                lambda path: path.write_text(plan.model_dump_json() + "\n", encoding="utf-8"),
            )
            sync(self.path)
        there = self.plan()
        assert there is not None
        return there

    def done(self) -> dict[int, RangeRecord]:
        """Return the records of the ranges that are done."""
        records = [read_record(path) for path in self.ranges.glob(f"*{RECORD}")]
        return {record.number: record for record in records}

    def whose(self, missing: Sequence[int]) -> str:
        """Return which parts these ranges are of, as words after a sentence; nothing where that is
        not known.
        """
        count = self._num_parts()
        if count is None:
            return ""
        parts = sorted({number % count + 1 for number in missing})
        return ": part " + ", ".join(f"{part}/{count}" for part in parts)

    def give(self) -> None:
        """Let what was joined become the data set, in one rename, and remove the rest."""
        with writing(self.out):
            sync(self.joined)
            refuse_occupied(self.out)
            self.joined.replace(self.place)
            sync(self.place.parent)
        self.clear()


def refuse_mount(out: Path) -> None:
    """Do nothing when a folder may be renamed to `out`, or nothing has to be: it is a data set.

    Raises: DataError when another file system is mounted there.
    """
    place = out.resolve()
    if os.path.ismount(place) and not (place / MANIFEST).is_file():
        raise DataError(
            f"{out} is a mount point, and a data set becomes whole by one rename, which cannot replace that.",
            fix=f"Choose a folder in it: --out {in_shell(out / 'NAME')}.",
        )


def refuse_occupied(out: Path) -> None:
    """Do nothing when there is room for a data set.

    Raises: DataError when something is there, or it is a mount point.
    """
    refuse_mount(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(
            f"{out} already exists and is not an empty folder.",
            fix="Choose another --out, or remove what is there.",
        )
