"""The name of a run, and the settings that may change when it resumes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from flatout.config import trust
from flatout.config.registry import RECIPES, recipe_path
from flatout.config.schema import (
    RunConfig,
    difference,
    flat,
    load_config,
    parse_overrides,
    read_recipe,
)
from flatout.errors import ConfigError, in_shell
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint import catalog
from flatout.training.run_dir.data_location import moved_data
from flatout.training.run_dir.layout import CONFIG, read_config, read_requested, require_model
from flatout.training.run_dir.runlog import RunLog

FREE_KEYS = (
    "log.",
    "checkpoint.every_",
    "checkpoint.keep",
    "checkpoint.best",
    "checkpoint.upload",
    "checkpoint.compress",
    "parallel.",
    "train.devices",
    "train.eval_every",
    "train.eval_tokens",
    "train.patience",
    "train.sample_every",
    "train.sample_prompt",
    "train.watchdog_",
    "train.max_bad_steps",
    "name",
)
"""Prefixes of the keys that may change when a run resumes: they do not change what a step computes,
except for the last bits of sums. Some decide when the run ends.
"""
OF_THIS_START = ("parallel.", "train.devices")
"""Prefixes of the free keys that describe the machine: each start states its own."""
LENGTH_KEYS = ("train.steps", "train.tokens", "train.epochs")
"""One of them sets the length of a run. `lengthen` decides when it may grow."""
NAMELESS_KEYS = (*FREE_KEYS, "format_version")
"""Prefixes of the keys that do not affect a run's name."""


def run_name(recipe: str | Path | RunConfig, overrides: Iterable[str] | None = None) -> str:
    """Return the name of a run's directory: its recipe, and 8 characters of what was stated.

    That is the values of the user's YAML and of the overrides, as they are parsed. A recipe of
    flatout counts by its name, a config built in Python by the fields that were set. So defaults
    may change with a release, and the same command finds its run again. NAMELESS_KEYS do not count.
    """
    config = load_config(recipe, overrides, trust_code=True)
    keys, values = {*flat(parse_overrides(overrides, RunConfig))}, flat(config.to_dict())
    if isinstance(recipe, RunConfig):
        keys |= recipe.stated()
    elif (path := recipe_path(recipe)) in map(RECIPES.path, RECIPES.names()):
        keys, values = keys | {"recipe"}, values | {"recipe": path.stem}
    else:
        keys |= flat(read_recipe(path)).keys()
    stated = {
        key: values[key]
        for key in keys
        if values.get(key) is not None and not key.startswith(NAMELESS_KEYS)
    }
    text = json.dumps(stated, sort_keys=True)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", config.name).strip(".-") or "run"
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def keys_that_may_change() -> str:
    """Return the sentence that lists the keys that may change when a run resumes."""
    keys = flat(RunConfig().to_dict()).keys()
    shown = [
        f"{prefix}*" if any(key.startswith(prefix) for key in keys - {prefix}) else prefix
        for prefix in FREE_KEYS
        if prefix != "name"
    ]
    return (
        f"Only these may change: {', '.join(shown)}; the paths of the same data; the "
        "micro-batch (batch.rows_per_device, batch.accumulate), if a step keeps its tokens; and "
        f"the length ({', '.join(LENGTH_KEYS)}), where the learning rates permit it."
    )


def config_to_resume(
    folder: Path, requested: RunConfig, *, trust_code: bool = False, progress: Progress = SILENT
) -> RunConfig | None:
    """Return a run's stored configuration with the free keys and data paths of `requested`.

    None when the directory contains no run, or one that has never saved: the next start is a new
    run and may change any setting. The stored length is kept, whatever `requested` sets: whether a
    run can be made longer depends on its data (`lengthen`). A different micro-batch is accepted
    if a step keeps its tokens, and moved data: `require_tokenizer` rejects a different tokenizer,
    and `require_same_data` different training tokens.
    Raises: UntrustedCode, before advice can repeat what config.yaml names; ConfigError for keys
            that contradict it, such as a different mix.
    """
    stored = read_config(folder)
    if stored is None and catalog.has_saved(folder):
        raise ConfigError(
            f"{folder} contains checkpoints, but no {CONFIG} with the settings of the run.",
            fix="Restore it from a copy, or start a new run from this one: "
            f"--resume {in_shell(folder)} --run-dir DIR.",
        )
    if stored is None:
        return None
    first = read_requested(folder)
    assert first is not None, "config.yaml has both"
    if not catalog.has_saved(folder) and RunLog(folder).summary is None:
        return None
    trust.require_trusted(
        folder, stored.references(), named=requested.references(), trust_code=trust_code
    )
    require_model(folder, stored, progress)
    return continued(
        stored,
        first,
        requested,
        place=str(folder),
        fix="Keep the stored settings, or start a new run. "
        f"`--resume {in_shell(folder)} --run-dir DIR` starts it from this one.",
    )


def continued(
    stored: RunConfig,
    first: RunConfig,
    requested: RunConfig,
    *,
    place: str,
    sent_by: str = "",
    fix: str,
) -> RunConfig:
    """Return `stored` with the free keys, data paths and micro-batch that `requested` states.

    Free keys that it does not state keep their stored values, except OF_THIS_START.
    `first` is the request that the run started with. `place` is where the run is,
    a path or a URL, and `sent_by` the end of that sentence.
    Raises: ConfigError, with `fix`, that names each key that contradicts the run and both values.
    """
    moved = moved_data(stored.data, requested.data)
    batch = _other_micro_batch(stored, requested)
    free = (*FREE_KEYS, *LENGTH_KEYS, *batch, *moved)
    contradictions = difference(stored, requested, free=free)
    if contradictions:
        changed = {line.partition(": ")[0] for line in difference(first, requested, free=free)}
        contradictions = [line for line in contradictions if line.partition(": ")[0] in changed]
    if contradictions:
        raise ConfigError(
            f"{place} contains a run with different settings{sent_by}: "
            f"{'; '.join(contradictions)}.",
            fix=f"{fix} {keys_that_may_change()}",
        )
    stated = requested.stated()
    values = {
        key: value
        for key, value in flat(requested.to_dict()).items()
        if key.startswith(FREE_KEYS)
        and (key in stated or key.startswith(OF_THIS_START))
        and key != "name"
    }
    return stored.with_values(values | batch | moved)


def _other_micro_batch(stored: RunConfig, requested: RunConfig) -> dict[str, int]:
    """Return the micro-batch that `requested` states, if a step keeps its tokens, else nothing.

    It changes only the last bits of sums, and the memory that a step needs.
    """
    rows, accumulate = requested.batch.rows_per_device, requested.batch.accumulate
    if stored.batch.rows_per_device == "auto" or requested.batch.chooses_rows:
        return {}
    per_step = stored.batch.rows_per_device * (stored.batch.accumulate or 1)
    if rows == "auto":
        rows = per_step // (accumulate or 1)
    elif accumulate is None and requested.batch.tokens_per_step is not None:
        accumulate = per_step // rows
    if rows * (accumulate or 1) != per_step:
        return {}
    return {"batch.rows_per_device": rows, "batch.accumulate": accumulate or 1}
