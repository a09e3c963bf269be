"""Checkpoints: everything a resume needs, in one folder that is whole or absent.

checkpoints/step-N/
├── model-RRRRR.safetensors       rank R's slices of the weights
├── optimizer-RRRRR.safetensors   rank R's slices of the optimizers' tensors
├── index.json                    every tensor's dtype and shape, and where each slice of it lies
├── state.json                    the other values of state.STATE, those of each rank apart, and the
environment └── manifest.json                 bytes and SHA-256 of every file; written last, then
the folder gets its name in one rename

One rank is the special case of several; they share one file system. No pickle is ever read or
written. What needs no torch (`latest`, `best`, `steps`, `prune`, `verify`) lives in catalog.py and
is handed on here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.files import read_json, understanding
from flatout.progress import SILENT, Progress, Task
from flatout.training.agreement import READING, together
from flatout.training.checkpoint import catalog, tensors
from flatout.training.checkpoint.catalog import best as best
from flatout.training.checkpoint.catalog import latest as latest
from flatout.training.checkpoint.catalog import prune as prune
from flatout.training.checkpoint.catalog import steps as steps
from flatout.training.checkpoint.catalog import verify as verify
from flatout.training.checkpoint.job import AtOnce, Saving
from flatout.training.checkpoint.state import STATE, VERSION, Part, weights_and_aliases
from flatout.training.checkpoint.tensors import Entry

if TYPE_CHECKING:
    from flatout.assembly.run import Run


def save(
    run: Run, *, environment: Mapping[str, Any] | None = None, progress: Progress = SILENT
) -> Path:
    """Write the run's state as `step-N`, N being `run.step`, and return that folder. Every rank
    calls it.

    A kill at any moment leaves the checkpoints before untouched. `environment`
    (`hardware.fingerprint()`) is stored, so that `load` can say what has changed. Checkpoints of
    later steps, from a course that was left, are set aside.
    Raises: RunFailed when a file cannot be written, on every rank.
    """
    with progress.task(f"Saving step {run.step}"):
        saving = Saving(run, environment or {}, start=AtOnce)
        while not saving.advance():
            pass
    for path in saving.aside:
        progress.say(set_aside_line(path))
    return saving.path


def set_aside_line(path: Path) -> str:
    """Return what is said of a checkpoint that was set aside."""
    return f"Set {path.name} aside: it is of a later step than this run has reached."


Check = Callable[[Path, dict[str, Any]], str | None]
"""Says what is wrong with a file, given its line in the manifest: `catalog.check_file`, or the
quick `catalog.check_size`.
"""


def load(
    run: Run,
    checkpoint: Path,
    *,
    environment: Mapping[str, Any] | None = None,
    check: Check = catalog.check_file,
    progress: Progress = SILENT,
) -> list[str]:
    """Put a checkpoint's state into a freshly built run, and return the differences that should be
    said aloud. Every rank calls it.

    Any number of ranks, however sharded, reads what any other wrote; each reads and checks only the
    files it needs. A checkpoint that `folder.resume_from` has just returned was read whole by its
    checksums: `check=catalog.check_size` spares reading it twice.
    Raises: CheckpointError, before the weights are touched, when a file is missing or damaged, or
            does not fit this run.
    """
    found: list[Any] = []
    with progress.task(f"Loading {checkpoint.name}") as task:
        together(run.mesh, lambda: found.extend(_open(run, checkpoint, check, task)), READING)
        index, state, parts, targets = found
        tensors.fill(targets, index, checkpoint, task)
        for part in parts:
            with understanding(checkpoint / catalog.STATE):
                _restore(run, part, state)
    return _differences(run, state, environment) + _forget_best(run, state, environment or {})


def read_weights(checkpoint: Path, *, progress: Progress = SILENT) -> dict[str, Tensor]:
    """Return every weight whole, by the name that the model's own state_dict uses, whatever number
    of ranks wrote it.

    Shapes: as in the model.
    Raises: CheckpointError when a file is missing or damaged.
    """
    index, aliases, manifest = _read_index(checkpoint, catalog.check_file)
    targets = {
        name: tensors.empty(entry) for name, entry in index.items() if name.startswith("model/")
    }
    with progress.task(f"Loading the weights of {checkpoint.name}") as task:
        _check(checkpoint, manifest, tensors.files_needed(targets, index), catalog.check_file, task)
        tensors.fill(targets, index, checkpoint, task)
    weights = targets | {alias: targets[name] for alias, name in aliases.items()}
    return {name.removeprefix("model/"): tensor for name, tensor in weights.items()}


def load_weights(
    run: Run, checkpoint: Path, *, check: Check = catalog.check_file, progress: Progress = SILENT
) -> None:
    """Put the weights of a checkpoint into a freshly built run, and nothing else of it. Every rank
    calls it; `check` as in `load`.

    Raises: CheckpointError, before the weights are touched, when a file is missing or damaged, or
            does not fit this run.
    """
    found: list[dict[str, Entry]] = []
    targets = weights_and_aliases(run.core)[0]

    def open_files(task: Task) -> None:
        index, _, manifest = _read_index(checkpoint, check)
        tensors.check_fits(targets, index, prefix="model/", source=checkpoint)
        _check(checkpoint, manifest, tensors.files_needed(targets, index), check, task)
        found.append(index)

    with progress.task(f"Loading the weights of {checkpoint.name}") as task:
        together(run.mesh, lambda: open_files(task), READING)
        tensors.fill(targets, found[0], checkpoint, task)


def stored_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that a checkpoint holds, by its name in the index.

    Raises: CheckpointError when its index is missing or damaged.
    """
    index = _read_index(checkpoint, catalog.check_file)[0]
    return {name: entry.shape for name, entry in index.items() if name.startswith("model/")}


def weights_sha256(checkpoint: Path) -> str:
    """Return one digest of all weights: equal for equal weights, whatever number of ranks wrote
    them.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(read_weights(checkpoint).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_index(
    checkpoint: Path, check: Check
) -> tuple[dict[str, Entry], dict[str, str], dict[str, Any]]:
    manifest = catalog.read_manifest(checkpoint)["files"]
    _check(checkpoint, manifest, {catalog.INDEX}, check, None)
    document = read_json(checkpoint / catalog.INDEX)
    with understanding(checkpoint / catalog.INDEX):
        index = {name: Entry.from_dict(entry) for name, entry in document["tensors"].items()}
        if lost := sorted(name for name in document["aliases"].values() if name not in index):
            raise KeyError(lost[0])
        return index, document["aliases"], manifest


def _check(
    checkpoint: Path, manifest: Mapping[str, Any], names: set[str], check: Check, task: Task | None
) -> None:
    for name in sorted(names):
        problem = (
            check(checkpoint / name, manifest[name])
            if name in manifest
            else f"{checkpoint / name} is not in the manifest."
        )
        if problem:
            raise CheckpointError(
                problem,
                fix=f"Use another checkpoint than {checkpoint}, or restore that file from a copy.",
            )
        if task:
            task.note(f"{name} is whole")


def _open(
    run: Run, checkpoint: Path, check: Check, task: Task
) -> tuple[dict[str, Entry], dict[str, Any], list[Part], dict[str, Tensor]]:
    """Check everything this rank will read, and make room for it: index, state, the parts to put
    back, the tensors to fill.
    """
    index, _, manifest = _read_index(checkpoint, check)
    _check(checkpoint, manifest, {catalog.STATE}, check, task)
    state = read_json(checkpoint / catalog.STATE)
    with understanding(checkpoint / catalog.STATE):
        version = int(state["version"])
        stored = {*state["values"], *state["ranks"][0]}
    if version > VERSION:
        raise CheckpointError(
            f"The state in {checkpoint} has version {version}; this flatout reads up to {VERSION}.",
            fix="Install a newer flatout.",
        )
    parts = [
        part for part in STATE if part.used(run) and (part.name in stored or not _may_lack(part))
    ]
    for part in parts:
        if part.name not in stored:
            raise CheckpointError(
                f"{checkpoint} has no {part.name}.",
                fix="Use another checkpoint, or the flatout that wrote this one.",
            )
    targets: dict[str, Tensor] = {}
    for part in parts:
        if part.targets and part.prefix:
            with understanding(checkpoint / catalog.STATE):
                wanted = part.targets(run, index, state["values"][part.name])
            tensors.check_fits(wanted, index, prefix=part.prefix, source=checkpoint)
            targets |= wanted
    _check(checkpoint, manifest, tensors.files_needed(targets, index), check, task)
    return index, state, parts, targets


def _may_lack(part: Part) -> bool:
    """Say whether a run that has this part can go on from one that had not: a GPU's generator,
    coming from a CPU.
    """
    return part.name == "rng_cuda"


def _restore(run: Run, part: Part, state: Mapping[str, Any]) -> None:
    if part.reseed is None:
        part.restore(run, state["values"][part.name])
    elif run.mesh.rank < len(state["ranks"]):
        part.restore(run, state["ranks"][run.mesh.rank][part.name])
    else:
        origin = f"{part.name} {state['ranks'][0][part.name]} {run.mesh.rank}"
        part.reseed(run, int.from_bytes(hashlib.sha256(origin.encode()).digest()[:6], "big"))


def _differences(
    run: Run, state: Mapping[str, Any], environment: Mapping[str, Any] | None
) -> list[str]:
    """Return, a sentence each, what may keep this run from going on in every bit as the saved one
    would have.
    """
    said = []
    if state["world_size"] != run.mesh.world_size:
        saved, here = (
            f"{n} process{'es' if n > 1 else ''}"
            for n in (state["world_size"], run.mesh.world_size)
        )
        said.append(
            f"The checkpoint was written by {saved} and is read by {here}: dropout and the last bits of sums will differ."
        )
    stored = {*state["values"], *state["ranks"][0]}
    used = {part.name for part in STATE if part.used(run)}
    said += [f"The checkpoint has no {name}: it starts afresh." for name in sorted(used - stored)]
    said += [
        f"The checkpoint's {name} has no place in this run and is dropped."
        for name in sorted(stored - used)
    ]
    if environment is not None:
        old = state["environment"]
        changed = [
            key for key in sorted({*old, *environment}) if old.get(key) != environment.get(key)
        ]
        said += [
            f"{key} has changed from {old.get(key)} to {environment.get(key)}: the last bits of results may differ."
            for key in changed
            if key not in {"data", "validation", "tokenizer"}
        ]
        if "data" in changed:
            said.append(
                "The data set holds other tokens than when the checkpoint was written: the run goes on, on another text."
            )
    return said


def _forget_best(run: Run, state: Mapping[str, Any], environment: Mapping[str, Any]) -> list[str]:
    """Let the best begin anew where its loss was measured on other validation tokens, and return
    the sentence that says so.
    """
    before, here = state["environment"].get("validation"), environment.get("validation")
    if run.best_step is None or before is None or here is None or before == here:
        return []
    best = f"{run.best_val_loss:.4f} at step {run.best_step}"
    run.best_val_loss = run.best_step = None
    return [
        f"The validation tokens have changed: losses do not compare with the best before ({best}). The best, and train.patience, count anew."
    ]
