"""lm-evaluation-harness: its model class for runs, and tasks that are scored with it.

Importing this module registers the class as `flatout`, and needs the package lm-eval. Exports are
scored with the harness's own class for transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager

from flatout.errors import ConfigError, DataError
from flatout.hardware import pick_device, probe
from flatout.inference.continuations import complete, encode_pair, score_pairs, score_texts
from flatout.inference.exported import ExportedModel
from flatout.inference.load import LoadedRun, load_run
from flatout.json_io import JsonObject
from flatout.progress import SILENT, Progress
from flatout.registry import unknown_name


@register_model("flatout")
class FlatoutLM(LM):  # type: ignore[misc]  # the package has no types
    """A run as a model of the harness: `simple_evaluate(model="flatout", model_args=...)`."""

    def __init__(
        self,
        run: str | LoadedRun,
        checkpoint: str = "best",
        device: str | None = None,
        trust_code: bool = False,
        progress: Progress = SILENT,
        **_: object,
    ) -> None:
        super().__init__()
        self._progress = progress
        self._loaded = (
            run
            if isinstance(run, LoadedRun)
            else load_run(
                run,
                checkpoint,
                device=device or "auto",
                precision="trained",
                trust_code=trust_code,
                progress=progress,
            )
        )

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        pairs = [encode_pair(self._loaded.tokenizer, *request.args) for request in requests]
        scores = score_pairs(self._loaded, pairs, progress=self._progress)
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log-likelihood of each whole text."""
        texts = [request.args[0] for request in requests]
        return score_texts(self._loaded, texts, progress=self._progress)

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return a completion of each prompt."""
        with self._progress.task("Generating", total=len(requests), unit="texts") as done:
            texts = []
            for request in requests:
                prompt, settings = request.args
                texts.append(complete(self._loaded, prompt, dict(settings)))
                done.advance(1)
        return texts


def model_of_harness(scored: LoadedRun | ExportedModel, progress: Progress = SILENT) -> LM:
    """Return a run or an export as a model of the harness; an export is loaded."""
    if isinstance(scored, LoadedRun):
        return FlatoutLM(scored, progress=progress)
    from lm_eval.models.huggingface import HFLM  # and transformers, which runs do not need

    return HFLM(
        pretrained=str(scored.folder.absolute()),
        trust_remote_code=scored.trust_code,
        device=pick_device("auto", probe())[0],
    )


def score_tasks(
    scored: LoadedRun | ExportedModel,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    folder: Path | None = None,
    progress: Progress = SILENT,
) -> list[JsonObject]:
    """Score a run or an export on tasks, and return one row per task and metric.

    `limit` is the number of samples of each task, `folder` has further task files (YAML).
    Raises: ConfigError for an unknown task, with the nearest one; DataError when the data of a task
            cannot be read.
    """
    known = TaskManager(include_path=None if folder is None else str(folder))
    for task in tasks:
        if not known.match_tasks([task]):
            raise unknown_task(task, known.all_tasks)
    names = ", ".join(tasks)
    model = model_of_harness(scored, progress)
    try:
        found = simple_evaluate(
            model=model,
            tasks=list(tasks),
            limit=limit,
            num_fewshot=num_fewshot,
            task_manager=known,
            log_samples=False,
        )
    except OSError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(
            f"The data of the tasks {names} cannot be read: {first}.",
            fix="Tasks of the harness are downloaded: check the network, or name a task of your "
            "own with --task-dir.",
        ) from error
    return rows_of(found or {})


def unknown_task(task: str, known: Sequence[str]) -> ConfigError:
    """Return the error for a task that the harness does not know, with the nearest one."""
    error = unknown_name("task", task, known)
    guess = error.fix.partition(" Known: ")[0]
    hint = f"{guess} " if guess.startswith("Did you mean") else ""
    return ConfigError(error.what, fix=f"{hint}`lm_eval ls tasks` lists all {len(known):,}.")


def rows_of(results: JsonObject) -> list[JsonObject]:
    """Return the harness's results as rows: task, metric, value, error, samples, examples."""
    rows = []
    for task, figures in results.get("results", {}).items():
        samples = results.get("n-samples", {}).get(task, {}).get("effective")
        for name, value in figures.items():
            metric, comma, filtered = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = figures.get(f"{metric}_stderr,{filtered}")
            rows.append(
                {
                    "task": task,
                    "metric": metric if filtered == "none" else f"{metric} ({filtered})",
                    "value": float(value),
                    "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                    "samples": samples,
                    "num_fewshot": results.get("n-shot", {}).get(task),
                }
            )
    return rows
