"""Load checkpoints: everything a resume needs, in a directory that is complete or absent.

checkpoints/step-N/
├── model-RRRRR.safetensors       rank R's slices of the weights
├── optimizer-RRRRR.safetensors   rank R's slices of the optimizers' tensors
├── index.json                    dtype, shape and slices of every tensor
├── state.json                    the other items of state.STATE, some per rank; the environment
├── info.json                     what is known about it, for lists: catalog.CheckpointInfo
└── manifest.json                 size and SHA-256 of every file, written last; then the directory
                                  is renamed to its final name

All ranks share one file system. A single rank is no special case. Nothing is ever pickled or
unpickled. Functions that do not need torch are in catalog.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from flatout.errors import CheckpointError
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import JsonObject, parsing, read_json
from flatout.training.agreement import READING, together
from flatout.training.checkpoint import catalog, tensors
from flatout.training.checkpoint.catalog import Entry, read_index
from flatout.training.checkpoint.state import STATE, StateItem
from flatout.training.checkpoint.weights import cuts_of, is_elsewhere

if TYPE_CHECKING:
    from flatout.assembly.run import Run


def load(
    run: Run,
    checkpoint: Path,
    *,
    environment: JsonObject | None = None,
    progress: Progress = SILENT,
) -> list[str]:
    """Restore a checkpoint into a newly built run, and return the differences as sentences.

    Every rank calls it. Any number of ranks, however sharded, reads what any other number wrote.
    Each reads only the slices it needs. The caller has verified the files, as `resume_from` does.
    Raises: CheckpointError, before the weights change, when it does not fit this run; RunFailed, on
            all ranks, when one of them cannot read a file.
    """
    with progress.task(f"Loading {checkpoint.name}") as task:
        index, state, items, targets = together(
            run.mesh, lambda: _prepare(run, checkpoint), READING
        )
        cuts = cuts_of(run.core, targets)
        together(run.mesh, lambda: tensors.fill(targets, index, checkpoint, task, cuts), READING)
        for item in items:
            with parsing(checkpoint / catalog.STATE):
                item.restore(run, state["values"][item.name])
    return _differences(run, state, environment) + _forget_best(run, state, environment or {})


def _prepare(
    run: Run, checkpoint: Path
) -> tuple[dict[str, Entry], JsonObject, list[StateItem], dict[str, Tensor]]:
    """Return the index, the state, the items to restore, and the tensors to fill, allocated."""
    stored = read_index(checkpoint).tensors.items()
    index = {name: entry for name, entry in stored if not is_elsewhere(run, name)}
    state = read_json(checkpoint / catalog.STATE)
    with parsing(checkpoint / catalog.STATE):
        values = dict(state["values"])
    items: list[StateItem] = []
    targets: dict[str, Tensor] = {}
    for item in STATE:
        if not item.used(run):
            continue
        if item.name not in values:
            raise CheckpointError(
                f"{checkpoint} has no {item.name}.",
                fix="Use a different checkpoint, or the version of flatout that wrote this one.",
            )
        items.append(item)
        if item.targets:
            with parsing(checkpoint / catalog.STATE):
                wanted = item.targets(run, index, values[item.name])
            tensors.check_fits(wanted, index, prefix=item.prefix, source=checkpoint)
            targets |= wanted
    return index, state, items, targets


def _differences(run: Run, state: JsonObject, environment: JsonObject | None) -> list[str]:
    """Return the reasons why the run may not continue bit-exactly, as sentences."""
    lines = []
    if state["world_size"] != run.mesh.world_size:
        saved, here = (
            f"{n} process{'es' if n > 1 else ''}"
            for n in (state["world_size"], run.mesh.world_size)
        )
        lines.append(
            f"The checkpoint was written by {saved} and is read by {here}: dropout and the last "
            "bits of sums will differ."
        )
    used = {item.name for item in STATE if item.used(run)}
    lines += [
        f"The checkpoint has {name}, which this run does not use: it is ignored."
        for name in sorted({*state["values"]} - used)
    ]
    if environment is not None:
        old = state["environment"]
        changed = [
            key for key in sorted({*old, *environment}) if old.get(key) != environment.get(key)
        ]
        lines += [
            f"{key} has changed from {old.get(key)} to {environment.get(key)}: the last bits of "
            "results may differ."
            for key in changed
            if key not in {"datasets", "validation", "tokenizer"}
        ]
        tokens = [
            [one["digest"] for one in each.get("datasets", [])] for each in (old, environment)
        ]
        if tokens[0] != tokens[1]:
            lines.append(
                "The tokens of the dataset are not those that the checkpoint was trained on: the "
                "run continues on different text."
            )
    return lines


def _forget_best(run: Run, state: JsonObject, environment: JsonObject) -> list[str]:
    """Reset the best loss if it was measured on other validation tokens, and return the message."""
    before, here = state["environment"].get("validation"), environment.get("validation")
    if run.best_step is None or before is None or here is None or before == here:
        return []
    best = f"{run.best_val_loss:.4f} at step {run.best_step}"
    run.best_val_loss = run.best_step = None
    run.evaluations_since_best = 0
    return [
        "The validation tokens have changed: losses do not compare with the earlier best "
        f"({best}). The best loss and train.patience start afresh."
    ]
