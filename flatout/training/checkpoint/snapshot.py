"""What one checkpoint will hold, taken from a run at one step; and how it becomes a folder, with no
further look at the run.

So the loop may go on while a snapshot is written, if its tensors are copies (`host_copy.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flatout.files import read_json, sha256, sync
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint import tensors as slices
from flatout.training.checkpoint.state import STATE, VERSION, Part, weights_and_aliases
from flatout.training.checkpoint.tensors import Entry

if TYPE_CHECKING:
    from flatout.assembly.run import Run


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a run's state at one step."""

    folder: Path
    """Of the run."""
    step: int
    rank: int
    world_size: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By file, this rank's part of each tensor that it writes."""
    buffers: frozenset[str]
    """Names of tensors that are no weights: a forward pass may change them."""
    entries: Mapping[str, Entry]
    """What the index says of them."""
    values: Mapping[str, Any]
    """The other values: on the main rank all of them, on the others those that each rank has of its
    own.
    """
    aliases: Mapping[str, str]
    environment: Mapping[str, Any]

    @property
    def final(self) -> Path:
        """The checkpoint's folder once it is whole."""
        return catalog.checkpoint_path(self.folder, self.step)

    @property
    def all_tensors(self) -> list[Tensor]:
        """This rank's parts of all files."""
        return [tensor for tensors in self.tensors.values() for tensor in tensors.values()]


def take(run: Run, environment: Mapping[str, Any]) -> Snapshot:
    """Return this rank's share of the state as it is now. Its tensors are the run's own: training
    changes them.

    Raises: CheckpointError when the state holds something that a checkpoint cannot.
    """
    rank, world_size = run.mesh.rank, run.mesh.world_size
    tensors: dict[str, dict[str, Tensor]] = {}
    entries: dict[str, Entry] = {}
    buffers: set[str] = set()
    for part in STATE:
        mine = (
            slices.owned(part.tensors(run), rank=rank, world_size=world_size)
            if part.tensors
            else {}
        )
        if mine:
            file = data_file(part, rank)
            tensors[file] = {name: slices.local_part(tensor) for name, tensor in mine.items()}
            entries |= slices.entries(file, mine)
            buffers |= {
                name
                for name, tensor in mine.items()
                if part.name == "weights" and not isinstance(tensor, nn.Parameter)
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
            part.name: part.read(run)
            for part in STATE
            if part.used(run) and (part.reseed or run.mesh.is_main)
        },
        aliases=weights_and_aliases(run.core)[1],
        environment=dict(environment),
    )


def tensors_to_save(run: Run) -> list[Tensor] | None:
    """Return this rank's parts of the tensors that a save after the next step will hold, stand-ins
    of the same sizes for those yet to come.

    None where the sizes are not known before the first step.
    """
    found: list[Tensor] = []
    for part in STATE:
        to_come = part.to_come(run)
        if to_come is None:
            return None
        tensors = (part.tensors(run) if part.tensors else {}) | to_come
        found += map(
            slices.local_part,
            slices.owned(tensors, rank=run.mesh.rank, world_size=run.mesh.world_size).values(),
        )
    return found


def write_share(snapshot: Snapshot, temporary: Path) -> None:
    """Write this rank's slices and values, and what the main rank must know about them."""
    files: dict[str, Any] = {}
    for name, tensors in snapshot.tensors.items():
        path = temporary / name
        slices.write(path, tensors)
        sync(path)
        files[name] = facts(path)
    entries = {name: entry.to_dict() for name, entry in snapshot.entries.items()}
    put(
        _share(temporary, snapshot.rank),
        {"tensors": entries, "files": files, "values": snapshot.values},
    )


def complete(snapshot: Snapshot, temporary: Path) -> list[Path]:
    """Join what all ranks wrote into one checkpoint, and give it its name. Only the main rank,
    after every rank has written.

    Returns: what checkpoints of later steps are called now, which were set aside.
    """
    paths = [_share(temporary, rank) for rank in range(snapshot.world_size)]
    shares = [read_json(path) for path in paths]
    index = slices.merge(
        {name: Entry.from_dict(entry) for name, entry in share["tensors"].items()}
        for share in shares
    )
    own = {part.name for part in STATE if part.reseed}
    state = {
        "version": VERSION,
        "step": snapshot.step,
        "world_size": snapshot.world_size,
        "environment": snapshot.environment,
        "values": {name: value for name, value in shares[0]["values"].items() if name not in own},
        "ranks": [
            {name: value for name, value in share["values"].items() if name in own}
            for share in shares
        ],
    }
    put(
        temporary / catalog.INDEX,
        {
            "tensors": {name: entry.to_dict() for name, entry in index.items()},
            "aliases": snapshot.aliases,
        },
    )
    put(temporary / catalog.STATE, state)
    for path in paths:
        path.unlink()
    files = {name: of_file for share in shares for name, of_file in share["files"].items()}
    files |= {name: facts(temporary / name) for name in (catalog.INDEX, catalog.STATE)}
    put(
        temporary / catalog.MANIFEST,
        {"format_version": catalog.FORMAT_VERSION, "step": snapshot.step, "files": files},
    )
    sync(temporary)
    aside = catalog.set_aside(snapshot.folder, after=snapshot.step)
    catalog.put_in_place(temporary, snapshot.final)
    return aside


def data_file(part: Part, rank: int) -> str:
    """Return the name of the file that holds a rank's slices of one part of the state."""
    return f"{(part.prefix or '').rstrip('/')}-{rank:05d}.safetensors"


def put(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON and sync it; the rename of the whole folder is what makes it count."""
    path.write_text(json.dumps(document), encoding="utf-8")
    sync(path)


def facts(path: Path) -> dict[str, Any]:
    """Return what the manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _share(temporary: Path, rank: int) -> Path:
    return temporary / f"part-{rank:05d}.json"
