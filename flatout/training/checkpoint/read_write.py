"""Load checkpoints: everything a resume needs, in a directory that is complete or absent.

checkpoints/step-N/
├── model-RRRRR.safetensors       rank R's slices of the weights
├── optimizer-RRRRR.safetensors   rank R's slices of the optimizers' tensors
├── index.json                    dtype, shape and slices of every tensor
├── state.json                    the other items of state.STATE, some per rank; the environment
├── info.json                     what is known about it, for lists: see info.py
└── manifest.json                 size and SHA-256 of every file, written last; then the directory
                                  is renamed to its final name

All ranks share one file system; a single rank is no special case. Nothing is ever pickled or
unpickled. Functions that do not need torch are in catalog.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.json_io import JsonObject, parsing, read_json
from flatout.progress import SILENT, Progress, Task
from flatout.training.agreement import READING, together
from flatout.training.checkpoint import catalog, tensors
from flatout.training.checkpoint.base import WEIGHTS
from flatout.training.checkpoint.catalog import Check, Entry, FileFacts, Index
from flatout.training.checkpoint.state import STATE, VERSION, StateItem
from flatout.training.checkpoint.weights import weights_of

if TYPE_CHECKING:
    from flatout.assembly.run import Run


def load(
    run: Run,
    checkpoint: Path,
    *,
    environment: JsonObject | None = None,
    check: Check = catalog.check_file,
    progress: Progress = SILENT,
) -> list[str]:
    """Restore a checkpoint into a newly built run, and return the differences as sentences.

    Every rank calls it. Any number of ranks, however sharded, reads what any other number wrote;
    each reads and checks only the files it needs. `check=catalog.check_size` avoids reading a
    checkpoint twice after `resume_from`, which has just verified it.
    Raises: CheckpointError, before the weights change, when a file is missing or damaged, or does
            not fit this run.
    """
    with progress.task(f"Loading {checkpoint.name}") as task:
        index, state, items, targets = together(
            run.mesh, lambda: _open(run, checkpoint, check, task), READING
        )
        tensors.fill(targets, index, checkpoint, task)
        for item in items:
            with parsing(checkpoint / catalog.STATE):
                _restore(run, item, state)
    return _differences(run, state, environment) + _forget_best(run, state, environment or {})


def read_weights(checkpoint: Path, check: Check = catalog.check_file) -> dict[str, Tensor]:
    """Return every stored weight, unsharded, by its name in the model's state_dict.

    Any number of ranks may have written them. A LoRA checkpoint stores adapters alone; `merged.py`
    adds them to their base. `check` is as in `load`.

    Shapes: as in the model.
    Raises: CheckpointError when a file is missing or damaged.
    """
    index, manifest = checked_index(checkpoint, check)
    entries = weights_in(index)
    targets = {name: tensors.empty(entry) for name, entry in entries.items()}
    check_files(checkpoint, manifest, tensors.files_needed(targets, entries), check)
    tensors.fill(targets, entries, checkpoint)
    weights = targets | {alias: targets[name] for alias, name in index.aliases.items()}
    return {name.removeprefix(WEIGHTS): tensor for name, tensor in weights.items()}


def load_weights(
    run: Run, checkpoint: Path, *, check: Check = catalog.check_file, progress: Progress = SILENT
) -> None:
    """Load only the weights of a checkpoint into a newly built run. Every rank calls it.

    `check` is as in `load`.
    Raises: CheckpointError, before the weights change, when a file is missing or damaged, or does
            not fit this run.
    """
    targets = weights_of(run)

    def open_files(task: Task) -> dict[str, Entry]:
        found, manifest = checked_index(checkpoint, check)
        index = found.tensors
        tensors.check_fits(targets, index, prefix=WEIGHTS, source=checkpoint)
        check_files(checkpoint, manifest, tensors.files_needed(targets, index), check, task)
        return index

    with progress.task(f"Loading the weights of {checkpoint.name}") as task:
        index = together(run.mesh, lambda: open_files(task), READING)
        tensors.fill(targets, index, checkpoint, task)


def weights_sha256(checkpoint: Path) -> str:
    """Return a digest of all stored weights; it does not depend on how many ranks wrote them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(read_weights(checkpoint).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights_in(index: Index) -> dict[str, Entry]:
    """Return the entry of every weight in an index, by its name there."""
    return {name: entry for name, entry in index.tensors.items() if name.startswith(WEIGHTS)}


def checked_index(checkpoint: Path, check: Check) -> tuple[Index, dict[str, FileFacts]]:
    """Return a checkpoint's index, whose file was checked, and the manifest's files.

    Raises: CheckpointError when a file is missing or damaged.
    """
    manifest = catalog.read_manifest(checkpoint).files
    check_files(checkpoint, manifest, {catalog.INDEX}, check)
    return catalog.read_index(checkpoint), manifest


def check_files(
    checkpoint: Path,
    manifest: Mapping[str, FileFacts],
    names: set[str],
    check: Check,
    task: Task | None = None,
) -> None:
    """Check files of a checkpoint against its manifest.

    Raises: CheckpointError naming the first one that is missing or damaged.
    """
    for name in sorted(names):
        path = checkpoint / name
        problem = check(path, manifest[name]) if name in manifest else catalog.not_listed(path)
        if problem:
            raise catalog.unusable(checkpoint, problem)
        if task:
            task.note(f"{name} is complete")


def _open(
    run: Run, checkpoint: Path, check: Check, task: Task
) -> tuple[dict[str, Entry], JsonObject, list[StateItem], dict[str, Tensor]]:
    """Check every file that this rank will read, and allocate the tensors to fill.

    Returns: the index, the state, the items to restore, the tensors to fill.
    """
    found, manifest = checked_index(checkpoint, check)
    index = found.tensors
    check_files(checkpoint, manifest, {catalog.STATE}, check, task)
    state = read_json(checkpoint / catalog.STATE)
    with parsing(checkpoint / catalog.STATE):
        version = int(state["version"])
        stored = _stored_items(state)
    if version > VERSION:
        raise CheckpointError(
            f"The state in {checkpoint} has version {version}; this flatout reads up to {VERSION}.",
            fix="Install a newer flatout.",
        )
    used = [item for item in STATE if item.used(run)]
    for item in used:
        # a run on a GPU resumes from a checkpoint written on a CPU
        if item.name not in stored and item.name != "rng_cuda" and not item.later:
            raise CheckpointError(
                f"{checkpoint} has no {item.name}.",
                fix="Use another checkpoint, or the version of flatout that wrote this one.",
            )
    items = [item for item in used if item.name in stored]
    targets: dict[str, Tensor] = {}
    for item in items:
        if item.targets:
            with parsing(checkpoint / catalog.STATE):
                wanted = item.targets(run, index, state["values"][item.name])
            tensors.check_fits(wanted, index, prefix=item.prefix, source=checkpoint)
            targets |= wanted
    check_files(checkpoint, manifest, tensors.files_needed(targets, index), check, task)
    return index, state, items, targets


def _stored_items(state: JsonObject) -> set[str]:
    return {*state["values"], *state["ranks"][0]}


def _restore(run: Run, item: StateItem, state: JsonObject) -> None:
    if item.reseed is None:
        item.restore(run, state["values"][item.name])
    elif run.mesh.rank < len(state["ranks"]):
        item.restore(run, state["ranks"][run.mesh.rank][item.name])
    else:
        origin = f"{item.name} {state['ranks'][0][item.name]} {run.mesh.rank}"
        item.reseed(run, int.from_bytes(hashlib.sha256(origin.encode()).digest()[:6], "big"))


def _differences(run: Run, state: JsonObject, environment: JsonObject | None) -> list[str]:
    """Return the reasons why the run may not continue bit for bit, as sentences."""
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
    stored, used = _stored_items(state), {item.name for item in STATE if item.used(run)}
    missing = used - stored - {item.name for item in STATE if item.later}
    lines += [f"The checkpoint has no {name}: it starts afresh." for name in sorted(missing)]
    lines += [
        f"The checkpoint has {name}, which this run does not use: it is ignored."
        for name in sorted(stored - used)
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
            if key not in {"data", "datasets", "validation", "tokenizer"}
        ]
        if "data" in changed and _training_tokens(old) != _training_tokens(environment):
            lines.append(
                "The tokens of the dataset are not those that the checkpoint was trained on: the "
                "run continues on different text."
            )
    return lines


def _training_tokens(environment: JsonObject) -> object:
    """Return what identifies the training tokens; earlier versions stored it for all splits."""
    datasets = environment.get("datasets")
    return environment.get("data") if datasets is None else [one["digest"] for one in datasets]


def _forget_best(run: Run, state: JsonObject, environment: JsonObject) -> list[str]:
    """Reset the best loss if it was measured on other validation tokens; return the message."""
    before, here = state["environment"].get("validation"), environment.get("validation")
    if run.best_step is None or before is None or here is None or before == here:
        return []
    best = f"{run.best_val_loss:.4f} at step {run.best_step}"
    run.best_val_loss = run.best_step = None
    return [
        "The validation tokens have changed: losses do not compare with the earlier best "
        f"({best}). The best loss and train.patience start afresh."
    ]
