"""From a run folder to its model: which run, which checkpoint, with which weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.config import RunConfig
from flatout.data.manifest import TOKENIZER
from flatout.data.mix import MixedDataset, open_data
from flatout.data.shards import Dataset
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import CheckpointError, ConfigError
from flatout.hardware import pick_device, probe
from flatout.models.language_model import LanguageModel
from flatout.progress import SILENT, Progress
from flatout.recipe import Recipe
from flatout.registry import MODELS, SPEEDUPS, nearest
from flatout.run import ops_of
from flatout.selection import Decision, assemble
from flatout.training import catalog
from flatout.training.checkpoint import read_weights
from flatout.training.folder import list_runs, read_config

if TYPE_CHECKING:
    from flatout.data.tokenizer import Tokenizer

ONLY_IN_TRAINING = frozenset({"compile"})
"""Speedups that cost more than they save when a model is called a few times."""
NOT_IN_SAMPLING = ONLY_IN_TRAINING | {"bf16-products"}
"""And those that work on many rows only: a prompt and the tokens after it are to be read in one arithmetic."""


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with what it needs to read and write text."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    recipe: Recipe
    folder: Path
    checkpoint: Path

    @cached_property
    def dataset(self) -> Dataset | MixedDataset:
        """The data it was trained on; sampling does not need it.

        Raises: DataError when it is no longer there.
        """
        return open_data(self.config.data)


def find_run(run: str | Path) -> Path:
    """Return the run folder that `run` names: a path, or a name under `runs/`.

    Raises: CheckpointError with the nearest run there is.
    """
    for folder in (Path(run), Path("runs") / run):
        if (folder / "config.yaml").exists():
            return folder
    known = [path.name for path in list_runs(Path("runs"))] if Path("runs").is_dir() else []
    guess = nearest(Path(run).name, known)
    raise CheckpointError(
        f"{run} is not a run folder: it has no config.yaml.",
        fix=f"Did you mean runs/{guess}?" if guess else "`flatout runs` shows the runs there are; `flatout demo` makes one.",
    )


def find_checkpoint(folder: Path, checkpoint: str = "best", *, progress: Progress = SILENT) -> Path:
    """Return the checkpoint folder that `best`, `last` or a step names; `best` is the last one while no loss is known.

    Raises: CheckpointError when there is none, or it is not whole; ConfigError when `checkpoint` is none of these.
    """
    if checkpoint in {"best", "last"}:
        found = catalog.best(folder, progress=progress) if checkpoint == "best" else None
        found = found or catalog.latest(folder, progress=progress)
        if found is None:
            raise CheckpointError(
                f"The run {folder} has no checkpoint yet.", fix="Train it first: `flatout train` saves every ten minutes and at the end."
            )
        return found
    if not checkpoint.isdecimal():
        raise ConfigError(f"{checkpoint!r} is not a checkpoint.", fix="Use best, last, or the number of a step.")
    path = catalog.checkpoint_path(folder, int(checkpoint))
    if not path.is_dir():
        known = ", ".join(str(step) for step in catalog.steps(folder)) or "none"
        raise CheckpointError(f"The run {folder} has no checkpoint of step {checkpoint}.", fix=f"Steps that have one: {known}.")
    catalog.require_whole(path, progress=progress)
    return path


def load_run(
    run: str | Path, checkpoint: str = "best", *, device: str = "auto", without: frozenset[str] = ONLY_IN_TRAINING, progress: Progress = SILENT
) -> LoadedRun:
    """Return the model of a run with the weights of a checkpoint (`best`, `last` or a step), its tokenizer and its data set.

    It has the speedups it was trained with, as far as they work here, but those of `without`.
    Raises: CheckpointError, DataError or ConfigError when one of them cannot be used.
    """
    folder = find_run(run)
    config = read_config(folder)
    if config is None or (config.data.path is None and config.data.mix is None):
        raise CheckpointError(f"{folder}/config.yaml names no data set.", fix="Use the folder of a run that `flatout train` made.")
    path = find_checkpoint(folder, checkpoint, progress=progress)
    where, _ = pick_device(device, probe())
    with progress.task(f"Loading {path.name} of {folder.name}"):
        recipe = assemble(_usable_speedups(config, without))
        model_class = MODELS.get(config.model.kind)
        own = model_class.check(config.model.own() | {"vocab_size": config.model.vocab_size}, seq_len=config.data.seq_len)
        model: LanguageModel = model_class(own, ops_of(recipe))
        model.load_state_dict(read_weights(path))
        model.to(where).eval()
        tokenizer = load_tokenizer(folder / TOKENIZER)
    return LoadedRun(model, tokenizer, config, recipe, folder, path)


def _usable_speedups(config: RunConfig, without: frozenset[str]) -> Iterator[Decision]:
    """Yield the run's own speedups that also work here: a model trained on a GPU can be tried on a laptop."""
    machine = probe()
    names = () if isinstance(config.speedups, str) else config.speedups
    for name in names:
        if name not in without and SPEEDUPS.get(name).why_not(machine, config) is None:
            yield Decision(name, True, "as trained")
