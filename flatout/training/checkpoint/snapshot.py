"""Snapshots: the content of one checkpoint, taken from a run at one step, and how to write it.

Writing does not read the run, so that training can continue meanwhile if the snapshot's tensors are
copies (`host_copy.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flatout.files import sha256, sync
from flatout.json_io import JsonObject, read_json
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint import tensors as slices
from flatout.training.checkpoint.catalog import Entry
from flatout.training.checkpoint.info import INFO
from flatout.training.checkpoint.state import STATE, VERSION, StateItem
from flatout.training.checkpoint.weights import weights_and_aliases

if TYPE_CHECKING:
    from flatout.assembly.run import Run


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a run's state at one step."""

    folder: Path
    """The run directory."""
    step: int
    rank: int
    world_size: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    """For each file, this rank's parts of the tensors that it writes."""
    buffers: frozenset[str]
    """Names of the tensors that are not parameters: a forward pass may change them."""
    entries: Mapping[str, Entry]
    """Index entries of the tensors."""
    values: JsonObject
    """The JSON values: all of them on the main rank, only the per-rank ones on the others."""
    aliases: Mapping[str, str]
    environment: JsonObject
    base: JsonObject | None = None
    """The base of the adapters of a LoRA run."""
    info: JsonObject | None = None
    """The content of info.json; None when there is none."""

    @property
    def final(self) -> Path:
        """The path of the checkpoint once it is complete."""
        return catalog.checkpoint_path(self.folder, self.step)

    @property
    def all_tensors(self) -> list[Tensor]:
        """This rank's parts in all files."""
        return [tensor for tensors in self.tensors.values() for tensor in tensors.values()]


def take(run: Run, environment: JsonObject, info: JsonObject | None = None) -> Snapshot:
    """Return this rank's share of the current state; its tensors share the run's memory.

    Raises: CheckpointError when the state contains something that a checkpoint cannot store.
    """
    rank, world_size = run.mesh.rank, run.mesh.world_size
    tensors: dict[str, dict[str, Tensor]] = {}
    entries: dict[str, Entry] = {}
    buffers: set[str] = set()
    for item in STATE:
        mine = slices.owned(item.tensors(run), rank=rank, world_size=world_size)
        if mine:
            file = data_file(item, rank)
            tensors[file] = {name: slices.local_part(tensor) for name, tensor in mine.items()}
            entries |= slices.entries(file, mine)
            buffers |= {
                name
                for name, tensor in mine.items()
                if item.name == "weights" and not isinstance(tensor, nn.Parameter)
            }
    return Snapshot(
        folder=run.folder,
        step=run.step,
        rank=rank,
        world_size=world_size,
        tensors=tensors,
        buffers=frozenset(buffers),
        entries=entries,
        values={
            item.name: item.read(run)
            for item in STATE
            if item.used(run) and (item.reseed or run.mesh.is_main)
        },
        aliases=weights_and_aliases(run.core)[1],
        environment=dict(environment),
        base=run.base,
        info=info,
    )


def tensors_to_save(run: Run) -> list[Tensor] | None:
    """Return this rank's parts of the tensors that a save after the next step will write.

    Tensors that do not exist yet are replaced by stand-ins of the same sizes. None when the sizes
    are unknown before the first step.

    Shapes: as in the run.
    """
    found: list[Tensor] = []
    for item in STATE:
        missing = item.missing(run)
        if missing is None:
            return None
        mine = slices.owned(
            item.tensors(run) | missing, rank=run.mesh.rank, world_size=run.mesh.world_size
        )
        found += map(slices.local_part, mine.values())
    return found


def write_share(snapshot: Snapshot, temporary: Path) -> None:
    """Write this rank's slices and values, and a description of them for the main rank."""
    files: JsonObject = {}
    for name, tensors in snapshot.tensors.items():
        path = temporary / name
        slices.write(path, tensors)
        sync(path)
        files[name] = facts(path)
    entries = {name: entry.model_dump() for name, entry in snapshot.entries.items()}
    _write(
        _share(temporary, snapshot.rank),
        {"tensors": entries, "files": files, "values": snapshot.values},
    )


def complete(snapshot: Snapshot, temporary: Path) -> list[Path]:
    """Merge the shares of all ranks into one checkpoint and publish it; the main rank only.

    Call it after every rank has written its share.
    Returns: the new paths of the checkpoints of later steps, which are set aside.
    """
    paths = [_share(temporary, rank) for rank in range(snapshot.world_size)]
    shares = [read_json(path) for path in paths]
    index = slices.merge(
        {name: Entry.model_validate(entry) for name, entry in share["tensors"].items()}
        for share in shares
    )
    per_rank = {item.name for item in STATE if item.reseed}
    values = shares[0]["values"].items()
    _write(
        temporary / catalog.INDEX,
        {
            "tensors": {name: entry.model_dump() for name, entry in index.items()},
            "aliases": snapshot.aliases,
            **({"base": snapshot.base} if snapshot.base else {}),
        },
    )
    _write(
        temporary / catalog.STATE,
        {
            "version": VERSION,
            "step": snapshot.step,
            "world_size": snapshot.world_size,
            "environment": snapshot.environment,
            "values": {name: value for name, value in values if name not in per_rank},
            "ranks": [
                {name: value for name, value in share["values"].items() if name in per_rank}
                for share in shares
            ],
        },
    )
    for path in paths:
        path.unlink()
    files = {name: of_file for share in shares for name, of_file in share["files"].items()}
    own = [catalog.INDEX, catalog.STATE]
    if snapshot.info is not None:
        _write(temporary / INFO, snapshot.info)
        own.append(INFO)
    files |= {name: facts(temporary / name) for name in own}
    _write(
        temporary / catalog.MANIFEST,
        {"format_version": catalog.FORMAT_VERSION, "step": snapshot.step, "files": files},
    )
    sync(temporary)
    sync_logs(snapshot.folder)
    aside = catalog.set_aside(snapshot.folder, after=snapshot.step)
    catalog.publish(temporary, snapshot.final)
    return aside


def sync_logs(run_folder: Path) -> None:
    """Sync the lines that a run has logged, which nothing else does while it trains.

    So no power loss leaves a checkpoint without the records up to its step. A disk that refuses is
    ignored: logs never stop a run.
    """
    with suppress(OSError):
        for path in run_folder.glob("*.jsonl"):
            if path.is_file():
                sync(path)
        sync(run_folder)


def data_file(item: StateItem, rank: int) -> str:
    """Return the name of the file with a rank's slices of one item of the state."""
    return f"{item.prefix.rstrip('/')}-{rank:05d}.safetensors"


def _write(path: Path, document: JsonObject) -> None:
    """Write JSON and sync it; not atomic, as the directory is renamed only when it is complete."""
    path.write_text(json.dumps(document), encoding="utf-8")
    sync(path)


def facts(path: Path) -> JsonObject:
    """Return the entry of a file in the manifest."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _share(temporary: Path, rank: int) -> Path:
    return temporary / f"part-{rank:05d}.json"
