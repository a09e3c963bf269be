"""Check a dataset or a run, or prove that a recipe resumes exactly."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from flatout.assembly import preflight
from flatout.cli.commands import Command, Overrides, TrustCode
from flatout.cli.commands.runs import CheckpointItem, checkpoint_items
from flatout.config.registry import RECIPES, SUFFIXES
from flatout.config.schema import load_config
from flatout.config.signature import Argument, Option, checked, texts
from flatout.data.store.manifest import TOKENIZER, read_manifest
from flatout.data.tokenizers import stored_digest
from flatout.display import Display, amount, table_of
from flatout.errors import CheckpointError, ConfigError, DataError, FlatoutError, in_shell
from flatout.measure.resume import ResumeProof
from flatout.models.families.export_mark import CARD, read_mark
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import FileEntry, expanded
from flatout.storage.json_io import Result
from flatout.storage.recognised import require_local
from flatout.storage.streams import shortened
from flatout.storage.whole import damage_of
from flatout.training.checkpoint import catalog
from flatout.training.run_dir import layout
from flatout.training.run_dir.lookup import RUNS
from flatout.training.run_dir.runlog import RunLog, missing_metrics

MOST_PROBLEMS = 20
"""Problems that are shown. The result lists all."""


class VerifyResult(Result):
    """The result of `verify`."""

    path: str
    """The directory or the recipe."""
    ok: bool
    """Whether everything is intact, or the recipe resumes exactly."""
    problems: list[str]
    """One sentence per problem, with the file and the offset where there is one."""
    files: int = 0
    """Files that the manifests list."""
    bytes: int
    """Bytes that were read."""
    kind: Literal["dataset", "checkpoint", "run", "export", "resume"] = "dataset"
    """What was verified."""
    checkpoints: tuple[CheckpointItem, ...] = ()
    """The checkpoints of a run, oldest first, or the one that was named."""
    newest_valid: str | None = None
    """The newest valid one of them."""
    resume: ResumeProof | None = None
    """With --resume: what was compared, and what differs."""

    @property
    def exit_code(self) -> int:
        """0 if `ok`, otherwise 1."""
        return 0 if self.ok else 1

    def display(self) -> Display:
        """Return what was read, and the problems with their fix."""
        if self.resume is not None:
            return self.resume.display()
        found = f"is damaged: {counted(len(self.problems), 'problem')}."
        read = f"{counted(self.files, 'file')} read, {amount(self.bytes, 'bytes')}."
        fix = "Fix: restore the damaged files from a copy, or delete the checkpoint or export."
        if self.kind == "run":
            fix = "Fix: restore the damaged files from a copy, or delete the damaged checkpoints."
        if self.kind == "dataset":
            fix = "Fix: delete the directory and run `flatout prepare` again, or copy it again."
        notes = [shortened(self.problems, MOST_PROBLEMS, "\n")] if self.problems else []
        if self.newest_valid and self.kind == "run":
            notes.append(f"The run resumes from the newest valid one, {self.newest_valid}.")
        notes += [] if self.ok else [fix]
        tables = [table_of(self.checkpoints)] if self.checkpoints else []
        return Display(
            f"{self.path} {'is intact.' if self.ok else found} {read}", (), tables, notes
        )


@checked
def verify(
    path: Annotated[
        str | Path,
        Argument(
            "A dataset, a checkpoint, an export, or a run or its name under runs/. With --resume, "
            "a recipe or a run."
        ),
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        Option("Train a recipe with and without a stop, and compare every bit."),
    ] = False,
    steps: Annotated[
        str | None,
        Option("With --resume: N,M, the steps before and after the stop (default: 5,5)."),
    ] = None,
    trust_code: TrustCode = False,
    *,
    progress: Progress = SILENT,
) -> VerifyResult:
    """Check a dataset, a checkpoint, an export or a run, or prove that a recipe resumes exactly.

    For a dataset or an export, it reads every file and compares its size and checksums with the
    manifest. For a checkpoint, it also checks the dtype and shape of each tensor. For a run, it
    checks all checkpoints, and shows the newest valid one.

    With --resume, it trains the recipe N + M steps, and again N steps, a stop and M steps, each in
    a fresh process and in a temporary directory, and compares every bit of the weights, the
    optimizer, the position in the data and the recorded losses. On a GPU, it
    sets train.deterministic=true, without which kernels sum in no fixed order and no two runs are
    equal.

    The exit code is 1 if something is damaged, or the resume is not exact.

    Raises: UsageError when it is none of these; RunFailed when the
            recipe cannot be trained.
    """
    require_local(path, error=DataError)
    shown, folder = str(path), Path(path)
    run = run_at(folder)
    given = [*texts(overrides), *["--steps"] * (steps is not None), *["--trust-code"] * trust_code]
    if resume:
        named = path if run is None or shown in RECIPES.names() else run / layout.CONFIG
        config = load_config(named, overrides, trust_code=trust_code)
        preflight.check(config)
        from flatout.measure.resume import prove_resume, steps_of

        proof = prove_resume(config, steps_of(steps, config.train.steps), progress=progress)
        return VerifyResult(
            path=shown,
            ok=proof.is_equal,
            problems=[] if proof.is_equal else proof.differences,
            bytes=proof.bytes,
            kind="resume",
            resume=proof,
        )
    if given:
        raise ConfigError(
            f"`flatout verify` uses {given[0]} only with --resume, which trains a recipe.",
            fix=f"Remove {given[0]}, or add --resume.",
        )
    if run is not None or catalog.is_checkpoint(folder):
        return _verify_checkpoints(run, run or folder, progress)
    if mark := read_mark(folder):
        files = [file for file in mark.files if file.name != CARD]  # people edit that one
        return _verify_files(shown, folder, files, "export", progress)
    _require_dataset(shown)
    folder = expanded(folder)
    return _verify_files(shown, folder, read_manifest(folder).files, "dataset", progress)


def _verify_files(
    shown: str,
    folder: Path,
    files: Sequence[FileEntry],
    kind: Literal["dataset", "export"],
    progress: Progress,
) -> VerifyResult:
    problems = damage_of(folder, files, progress=progress)
    return VerifyResult(
        path=shown,
        ok=not problems,
        problems=problems,
        files=len(files),
        bytes=sum(file.size_bytes for file in files),
        kind=kind,
    )


def run_at(path: Path) -> Path | None:
    """Return the run directory at a path, also at its checkpoints, or of that name under runs/."""
    above = [path.parent] if path.name == "checkpoints" else []
    candidates = [path, *above] if path.exists() else [RUNS / path]
    return next((one for one in candidates if (one / layout.CONFIG).is_file()), None)


def _require_dataset(path: str) -> None:
    """Check that a path can be a dataset: not a recipe, nor a checkpoint that does not exist.

    Raises: ConfigError; CheckpointError that names the steps that have a checkpoint.
    """
    given = Path(path)
    if given.suffix in SUFFIXES or (path in RECIPES.names() and not given.exists()):
        raise ConfigError(
            f"{path} is a recipe, not a dataset, a checkpoint or a run.",
            fix=f"`flatout verify --resume {in_shell(path)}` proves that it resumes exactly.",
        )
    if (known := catalog.steps_in(given.parent)) and not given.exists():
        raise CheckpointError(
            f"There is no checkpoint {path}.",
            fix=f"Steps that have one: {shortened(known[::-1])}.",
        )


def _verify_checkpoints(run: Path | None, folder: Path, progress: Progress) -> VerifyResult:
    """Check a checkpoint, or all those of a run, its configuration and its tokenizer.

    Raises: CheckpointError when the run has no checkpoint.
    """
    items = checkpoint_items(folder, read=True, progress=progress)
    if not items:
        raise CheckpointError(
            f"The run {run} has no checkpoint yet.",
            fix="Train it first: `flatout train` saves every ten minutes and at the end.",
        )
    valid = [item.path for item in items if item.valid]
    problems = _run_problems(run, valid) if run else []
    problems += [problem for item in items for problem in item.problems]
    return VerifyResult(
        path=str(folder),
        ok=not problems,
        problems=problems,
        files=sum(item.files for item in items),
        bytes=sum(item.bytes for item in items),
        kind="run" if run else "checkpoint",
        checkpoints=tuple(items),
        newest_valid=valid[-1] if valid else None,
    )


def _run_problems(run: Path, valid: Sequence[str]) -> list[str]:
    """Return what is wrong with the files of a run beside its checkpoints."""
    problems = []
    try:
        layout.read_config(run)
    except FlatoutError as error:
        problems.append(error.what)
    log = RunLog(run)
    deque(log.lines(), maxlen=0)
    info = catalog.read_info(Path(valid[-1])) if valid and log.events else None
    lost = missing_metrics(run, info) if info else None
    problems += [*log.notes, *([lost] if lost else [])]
    known, kept = valid and catalog.tokenizer_of(Path(valid[-1])), run / TOKENIZER
    if known and kept.exists() and stored_digest(kept) != known:
        problems.append(
            f"{kept} is damaged or was replaced: the model was trained with a different tokenizer."
        )
    return problems


COMMAND = Command(call=verify, example="flatout verify data/book")
