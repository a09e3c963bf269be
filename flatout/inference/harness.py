"""Scores models on the tasks of lm-evaluation-harness, by its own class for transformers.

Needs the package lm-eval with the extra hf.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from flatout.config.registry import unknown_name
from flatout.errors import ConfigError, DataError
from flatout.hardware.machine import pick_device, probe
from flatout.storage.json_io import JsonObject


def score_tasks(
    export: Path,
    tasks: Sequence[str],
    *,
    trust_code: bool,
    limit: int | None = None,
    num_fewshot: int | None = None,
    folder: Path | None = None,
) -> list[JsonObject]:
    """Score an export for transformers on tasks, and return one row per task and metric.

    `trust_code` lets its own modeling file be imported, `limit` is the number of samples of each
    task, `folder` has further task files (YAML).
    Raises: ConfigError for an unknown task, with the nearest one; DataError when the data of a task
            cannot be read.
    """
    known = TaskManager(include_path=None if folder is None else str(folder))
    for task in tasks:
        if not known.match_tasks([task]):
            raise unknown_task(task, known.all_tasks)
    names = ", ".join(tasks)
    model = HFLM(
        pretrained=str(export.absolute()),
        trust_remote_code=trust_code,
        device=pick_device("auto", probe())[0],
    )
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
