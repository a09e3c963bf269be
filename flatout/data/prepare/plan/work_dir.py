"""The work directory of a prepare, `.OUT.part/` beside OUT, from which a killed prepare resumes.

It contains `plan.json`, `tokenizer.json`, the records of finished ranges in `ranges/`, and their
shards in `dataset/`, which becomes OUT. It is owned by one process, or by several that each do a
part of the work. It is removed when OUT is complete, or when there is nothing to resume from.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Self

from flatout.data.prepare.pack.range_files import (
    DATASET,
    RANGES,
    RECORD,
    RangeRecord,
    read_records,
    read_stored,
    record_path,
)
from flatout.data.prepare.pack.work_items import WorkPlan
from flatout.data.prepare.request.request import refuse_occupied
from flatout.data.store.manifest import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    ShardEntry,
    SkippedRows,
    TokenizerEntry,
    token_dtype,
)
from flatout.data.tokenizers import Tokenizer, stored_files
from flatout.errors import DataError
from flatout.storage.files import (
    PART,
    Unfinished,
    is_open_at,
    lock,
    sync,
    write_first,
    write_whole,
    writing,
)
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import shortened
from flatout.storage.whole import entry_of, problem_of, publish

PLAN = "plan.json"
_PART_MARK = "part-{}-of-{}"
_PARTS = "parts"
"""File with the number of parts, if the work is divided into parts."""


@dataclass(frozen=True)
class WorkPart:
    """One process's part of the work: every `count`-th range, starting with the `index`-th."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the part that `I/N` names.

        Raises: DataError when the text is not a part.
        """
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise DataError(
                f"--part {text!r} is not a part.",
                fix="Write I/N, for example 2/8: the second of eight.",
            )
        return cls(int(index), int(count))

    def has(self, number: int) -> bool:
        """Return whether a range belongs to this part."""
        return number % self.count == self.index - 1


class WorkDir:
    """The work directory of `out`. As a context manager, creates and owns it, or one part of it.

    Raises: DataError when another process owns it, or the disk cannot be written.
    """

    def __init__(self, out: Path, part: WorkPart | None = None) -> None:
        self._part = part
        self.out = out
        self.target = out.resolve()
        """Where the dataset will be."""
        self.path = self.target.parent / f".{self.target.name}{PART}"
        self.ranges = self.path / RANGES
        """Directory of the records of packed ranges."""
        self.dataset = self.path / DATASET
        """Directory that becomes the dataset."""
        self.tokenizer = self.path / TOKENIZER
        self.failed = self.path / "failed"
        """Exists after an error in the text: then other text or options may replace the work."""
        self._locks: list[int] = []
        self._created_parents: list[Path] = []

    def __enter__(self) -> Self:
        self.claim()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _: object) -> None:
        if self._locks and self._part is None:
            self._remove_unfinished_files()
            if not any(self.ranges.glob(f"*{RECORD}")):
                self.clear()
            elif isinstance(error, Unfinished):
                error.add_note(f"The finished parts are kept in {self.path}.")
        elif self._locks:
            with contextlib.suppress(BlockingIOError):  # other parts work in the directory
                lock(self._locks[0])
                if not (self.path / PLAN).exists():
                    self._remove()
        self.close()

    def claim(self) -> None:
        """Create the directory if needed, and own it, so that no work is done twice."""
        with writing(self.out):
            while not self._locks:
                missing = [parent for parent in self.path.parents if not parent.exists()]
                self._created_parents += missing
                self.path.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # its owner has just removed it
                    self._own()

    def _own(self) -> None:
        """Lock the directory until the process ends: exclusively, or shared with other parts.

        All parts have the same count. The first part sets it.

        Raises: DataError when another process has the lock, or the counts differ.
        """
        part = self._part
        if part is None:
            self._lock(self.path)
            self._remove_unfinished_files()
            return
        self._lock(self.path, shared=True)
        write_first(
            self.path / _PARTS, lambda path: path.write_text(f"{part.count}\n", encoding="utf-8")
        )
        count = self._num_parts()
        if count != part.count:
            self.close()
            raise DataError(
                f"--part {part.index}/{part.count}: the work in {self.path} is divided into "
                f"{count} parts.",
                fix=f"Use the same N in all parts, here --part I/{count}. Or remove that "
                "directory, which discards the work done so far.",
            )
        mark = self.path / _PART_MARK.format(part.index, part.count)
        os.close(os.open(mark, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666))
        self._lock(mark)

    def _num_parts(self) -> int | None:
        """Return the number of parts. None when unknown."""
        path = self.path / _PARTS
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        return int(text) if text.isdecimal() else None

    def _lock(self, path: Path, *, shared: bool = False) -> None:
        """Lock a directory or a file.

        Raises: DataError when another process has locked it, or it is a link; FileNotFoundError
                when its owner has just removed it.
        """
        if path.is_symlink():
            raise DataError(
                f"{path} is a symbolic link, and prepare does not write through links.",
                fix=f"Delete {path}, or choose a different --out.",
            )
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        self._locks.append(descriptor)
        try:
            lock(descriptor, shared=shared)
        except BlockingIOError as error:
            self.close()
            raise DataError(
                f"Another process is writing {self.out}.",
                fix="Wait for it, or choose a different --out.",
            ) from error
        if not is_open_at(path, descriptor):
            self.close()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _remove_unfinished_files(self) -> None:
        for path in self.path.rglob(f"*{PART}"):
            path.unlink()

    def close(self) -> None:
        """Release the directory."""
        while self._locks:
            os.close(self._locks.pop())

    def clear(self) -> None:
        """Remove the directory with all work done, unless other processes work in it."""
        if self._locks and self._part is None:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in self._created_parents:
            with contextlib.suppress(OSError):  # something else is in it by now
                parent.rmdir()

    def keep(self, error: DataError) -> DataError:
        """Keep the finished ranges after an error in the text, and return the error to raise.

        Corrected text or options start over, unless other parts share the directory. The error then
        tells the user what to do.
        """
        if self._part is None:
            with writing(self.out):
                self.failed.touch()
            if any(self.ranges.glob(f"*{RECORD}")):
                error.add_note(f"The finished parts are kept in {self.path}.")
            return error
        return DataError(
            error.what,
            fix=f"{error.fix} Other text or options make it a different dataset: remove the "
            f"directory {self.path}, which all parts share, and run every part again.",
        )

    def plan(self) -> WorkPlan | None:
        """Return the stored plan, None when there is none.

        Raises: DataError when it is damaged, or was written by a different version of flatout.
        """
        path = self.path / PLAN
        if not path.is_file():
            return None
        return read_stored(path, WorkPlan, work_dir=self.path)

    def make(self) -> None:
        """Empty the directory, unless it is shared with other parts, and make those inside."""
        with writing(self.out):
            if self._part is None:
                for path in self.path.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.ranges.mkdir(exist_ok=True)
            self.dataset.mkdir(exist_ok=True)

    def begin(self, plan: WorkPlan, tokenizer: Tokenizer) -> WorkPlan:
        """Create the directory and write the plan, unless another process was first. Return it."""
        self.make()
        with writing(self.out):
            write_first(self.tokenizer, tokenizer.save)
            text = plan.model_dump_json() + "\n"
            write_first(self.path / PLAN, lambda path: path.write_text(text, encoding="utf-8"))
            sync(self.path)
        stored = self.plan()
        assert stored is not None
        return stored

    def done(self) -> dict[int, RangeRecord]:
        """Return the records of the packed ranges by number."""
        return read_records(self.ranges)

    def parts_of(self, missing: Sequence[int]) -> str:
        """Return `: part 1/4, 2/4` for the parts of these ranges. Empty when unknown."""
        count = self._num_parts()
        if count is None:
            return ""
        parts = sorted({number % count + 1 for number in missing})
        return f": part {shortened([f'{part}/{count}' for part in parts])}"

    def require_files(self, records: Iterable[RangeRecord]) -> None:
        """Check that the files of ranges have their sizes, and remove the records of others.

        Ranges without a record are packed again.
        Raises: Unfinished with the number of these ranges.
        """
        incomplete = 0
        for record in records:
            entries = chain.from_iterable(shard.files for shard in record.shards)
            if any(problem_of(self.dataset / entry.name, entry, deep=False) for entry in entries):
                record_path(self.ranges, record.number).unlink()
                incomplete += 1
        if incomplete:
            raise Unfinished(
                f"{incomplete} ranges in {self.path} have lost files.",
                fix="Run the same command again: it packs them again, and keeps the rest.",
            )

    def publish(
        self,
        tokenizer: Tokenizer,
        shards: Iterable[ShardEntry],
        *,
        source: JsonObject,
        split_rule: str,
        skipped: Iterable[SkippedRows] = (),
        cut_documents: int = 0,
    ) -> Manifest:
        """Write the tokenizer and the manifest, rename the directory of shards to OUT, and remove
        this one. Return the manifest.
        """
        with writing(self.out):
            tokenizer.save(self.dataset / TOKENIZER)
            files = stored_files(self.dataset / TOKENIZER)
            manifest = Manifest(
                flatout=str(import_module("flatout").__version__),
                dtype=token_dtype(tokenizer.vocab_size),
                vocab_size=tokenizer.vocab_size,
                tokenizer=TokenizerEntry(
                    name=tokenizer.name,
                    digest=tokenizer.digest(),
                    files=tuple(map(entry_of, files)),
                ),
                shards=tuple(shards),
                source=dict(source),
                split_rule=split_rule,
                skipped=tuple(skipped),
                cut_documents=cut_documents,
            ).sealed()
            listed = {entry.name for entry in manifest.files}
            for path in self.dataset.iterdir():  # of ranges that were packed anew without tokens
                if path.name not in listed:
                    path.unlink()
            write_whole(self.dataset / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
            refuse_occupied(self.out)
            publish(self.dataset, self.target)
        self.clear()
        return manifest
