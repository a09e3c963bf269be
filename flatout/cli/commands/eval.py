"""Score a trained model on validation text, or on tasks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import CheckpointName, Command
from flatout.config.signature import Argument, Option, checked
from flatout.display import aligned, optional
from flatout.errors import ConfigError
from flatout.inference.exported import (
    is_export,
    require_packages,
    require_scorable,
    require_tasks,
)
from flatout.models.families.export_mark import require_as_exported
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored
from flatout.storage.json_io import Result
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import run_or_newest


class DatasetScore(Stored):
    """A model's score on the validation text of one dataset."""

    name: str
    """The end of its path, long enough to be unique."""
    path: str
    """Its directory."""
    val_loss: float
    """Mean loss per token, in nats."""
    perplexity: float
    """exp(val_loss)."""
    bits_per_byte: float | None
    """Bits per byte of its text."""
    tokens: int
    """Tokens that were predicted."""


class TaskScore(Stored):
    """A model's score on one task, by one metric."""

    task: str
    """Its name in lm-evaluation-harness."""
    metric: str
    """The metric, such as acc or acc_norm."""
    value: float
    stderr: float | None
    """Standard error of the value."""
    samples: int | None
    """Questions that were asked."""
    num_fewshot: int | None
    """Examples in front of each question."""


class EvalResult(Result):
    """A model's score on validation text, or on tasks."""

    run: str
    """The run directory, or the export."""
    checkpoint: str
    """The checkpoint that was scored, or the export."""
    val_loss: float | None = None
    """Mean loss per token, in nats. For a mix, the datasets' losses weighted by their shares.

    Null with --tasks, as are the next three."""
    perplexity: float | None = None
    """exp(val_loss)."""
    bits_per_byte: float | None = None
    """Bits per byte of text, comparable between tokenizers."""
    tokens: int | None = None
    """Tokens that were predicted."""
    by_dataset: tuple[DatasetScore, ...] = ()
    """The score on each dataset, even if there is only one."""
    tasks: tuple[TaskScore, ...] = ()
    """The scores on the tasks of --tasks."""

    def summary(self) -> str:
        """Return the scores, one per line. For several datasets, a table with a total."""
        if self.tasks:
            head = ("task", "metric", "value", "error", "samples", "examples")
            rows = (
                (
                    *(score.task, score.metric, f"{score.value:.4f}"),
                    optional(score.stderr, ".4f"),
                    *(optional(count, ",") for count in (score.samples, score.num_fewshot)),
                )
                for score in self.tasks
            )
            return "\n".join([self.checkpoint, *aligned([head, *rows])])
        head_line = f"{self.checkpoint}, {self.tokens or 0:,} validation tokens"
        total = self.model_dump(include={"val_loss", "perplexity", "bits_per_byte", "tokens"})
        scores = [*self.by_dataset, DatasetScore(name="total", path="", **total)]
        if len(self.by_dataset) > 1:
            return f"{head_line}\n{score_table(scores)}"
        loss, perplexity, bits = _figures(scores[-1])
        if self.bits_per_byte is None:
            bits = "unknown: only a part was scored, or the dataset does not record its bytes"
        return (
            f"{head_line}\nLoss           {loss} nats per token\nPerplexity     {perplexity}\n"
            f"Bits per byte  {bits}"
        )


def score_table(scores: Sequence[DatasetScore]) -> str:
    """Return a table with one line per dataset."""
    head = ("dataset", "loss", "perplexity", "bits per byte", "tokens")
    rows = ((score.name, *_figures(score), f"{score.tokens:,}") for score in scores)
    return "\n".join(aligned([head, *rows]))


def _figures(score: DatasetScore) -> tuple[str, str, str]:
    form = ".2f" if score.perplexity < 1e9 else ".2g"
    bits = "unknown" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
    return f"{score.val_loss:.4f}", format(score.perplexity, form), bits


OtherData = Annotated[
    list[str] | list[Path] | str | Path | None,
    Option(
        "Score on this dataset, a directory or a URL, instead of the run's own (repeatable). "
        "It must have the run's tokenizer."
    ),
]
MaxTokens = Annotated[
    int | None,
    Option(
        "Score only the first tokens of the validation text, divided among the datasets of a mix.",
        min=1,
    ),
]
Tasks = Annotated[
    list[str] | str | None,
    Option(
        "Score on these tasks of lm-evaluation-harness instead, separated by commas: "
        "hellaswag,arc_easy. Their data is downloaded."
    ),
]
Limit = Annotated[int | None, Option("With --tasks: ask only the first questions of each.", min=1)]
Fewshot = Annotated[
    int | None,
    Option("With --tasks: examples in front of each question, if not the task's own.", min=0),
]
TaskDir = Annotated[
    Path | str | None, Option("With --tasks: a directory with your own task files (YAML).")
]


RunOrExport = Annotated[
    str | Path | None,
    Argument(
        "A run directory, or its name under runs/ (default: the newest run there). With --tasks, "
        "also a directory that `flatout export` wrote for transformers."
    ),
]
TrustTheCode = Annotated[
    bool,
    Option(
        "Allow a run from elsewhere to import the code it names, or an export its own modeling "
        "file, this once (SECURITY.md)."
    ),
]


@checked
def evaluate(
    run: RunOrExport = None,
    checkpoint: CheckpointName = None,
    data: OtherData = None,
    max_tokens: MaxTokens = None,
    trust_code: TrustTheCode = False,
    tasks: Tasks = None,
    limit: Limit = None,
    num_fewshot: Fewshot = None,
    task_dir: TaskDir = None,
    *,
    progress: Progress = SILENT,
) -> EvalResult:
    """Score a trained model on its validation text, in the precision that it was trained in.

    Each dataset of a mix is also scored by itself. With --tasks, the model is scored on tasks of
    lm-evaluation-harness instead. It may then be an export for transformers, and a run is exported
    to a temporary directory, in the type of its weights.

    Raises: CheckpointError when the run has no such checkpoint; DataError when a dataset cannot be
            read; ConfigError for an unknown task; MissingPackage; UntrustedCode.
    """
    words = [tasks] if isinstance(tasks, str) else tasks or ()
    names = [name.strip() for word in words for name in word.split(",") if name.strip()]
    if tasks is not None and not names:
        raise ConfigError(
            "--tasks names no task.", fix="Name tasks, with commas between them, or remove it."
        )
    of_text = {"data": data, "max_tokens": max_tokens}
    of_tasks = {"limit": limit, "num_fewshot": num_fewshot, "task_dir": task_dir}
    _require_fitting(of_text if names else of_tasks, has_tasks=bool(names))
    export = Path(run) if run is not None and is_export(run) else None
    if export is not None:
        require_tasks(export, checkpoint, has_tasks=bool(names))
    if names:
        require_packages()
    if export is not None:
        require_scorable(export, trust_code=trust_code)
        require_as_exported(export, progress=progress)
    else:
        folder = run_or_newest(run, progress=progress)
        trusted_config(folder, trust_code=trust_code)
    if names:
        from flatout.inference.export.export import export_run
        from flatout.inference.export.source import open_source
        from flatout.inference.harness import score_tasks

        with tempfile.TemporaryDirectory(prefix="flatout-") as work:
            if export is not None:
                scored = checkpoint_path = export
            else:
                source = open_source(folder, checkpoint, trust_code=trust_code, progress=progress)
                scored, checkpoint_path = Path(work) / "model", source.checkpoint
                export_run(source, scored, "huggingface", progress=progress)
            rows = score_tasks(
                scored,
                names,
                trust_code=trust_code or export is None,  # the file is flatout's own
                limit=limit,
                num_fewshot=num_fewshot,
                folder=Path(task_dir) if task_dir else None,
            )
        return EvalResult(
            run=str(export or folder),
            checkpoint=str(checkpoint_path),
            tasks=tuple(TaskScore(**row) for row in rows),
        )
    from flatout.inference.load import load_run
    from flatout.inference.scoring import score_run

    loaded = load_run(
        folder, checkpoint, precision="trained", trust_code=trust_code, progress=progress
    )
    several = [data] if isinstance(data, str | Path) else data or ()
    found = score_run(loaded, data=several, max_tokens=max_tokens, progress=progress)
    return EvalResult(
        run=str(loaded.folder),
        checkpoint=str(loaded.checkpoint),
        val_loss=found.loss,
        perplexity=found.perplexity,
        bits_per_byte=found.bits_per_byte,
        tokens=found.tokens,
        by_dataset=tuple(DatasetScore(**one.to_dict()) for one in found.by_dataset),
    )


def _require_fitting(excluded: Mapping[str, object], *, has_tasks: bool) -> None:
    """Check that no option of the other kind of scoring was given.

    Raises: ConfigError.
    """
    for name, value in excluded.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"--tasks and {option} exclude each other."
                if has_tasks
                else f"{option} only applies to the questions of --tasks.",
                fix=f"Remove {option}. --limit limits the questions of a task."
                if has_tasks
                else f"Remove {option}, or add --tasks.",
            )


COMMAND = Command(evaluate, example="flatout eval runs/demo")
