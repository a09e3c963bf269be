"""From a run folder to its model: which run, which checkpoint, with which weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flatout.assembly.recipe import Recipe, Speedup
from flatout.assembly.run import ops_of
from flatout.assembly.selection import Decision, assemble
from flatout.config.schema import RunConfig
from flatout.data.store.manifest import TOKENIZER
from flatout.data.store.mix import MixedDataset, open_data
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import load_tokenizer
from flatout.errors import CheckpointError, DataError, in_shell
from flatout.hardware import pick_device, probe
from flatout.models.language_model import LanguageModel, model_of
from flatout.progress import SILENT, Progress
from flatout.registry import SPEEDUPS
from flatout.training.checkpoint.catalog import tokenizer_of
from flatout.training.checkpoint.read_write import read_weights
from flatout.training.run_dir.data_location import found_again, is_there
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import find_checkpoint, find_run

if TYPE_CHECKING:
    from flatout.data.tokenizers import Tokenizer

Arithmetic = Literal["fp32", "trained"]
"""What a loaded model computes in: fp32, or the precision that the run was trained and evaluated
in.
"""


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with what it needs to read and write text."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    recipe: Recipe
    folder: Path
    checkpoint: Path
    progress: Progress = SILENT
    """Where fetching its data reports."""

    @cached_property
    def dataset(self) -> Dataset | MixedDataset:
        """The data it was trained on, which may have been moved together with the run; sampling
        does not need it.

        Raises: DataError when it is no longer there, or cannot be fetched.
        """
        try:
            return open_data(self.config.data, progress=self.progress)
        except DataError as error:
            if is_there(self.config.data):
                raise
            moved = found_again(self.config.data, self.folder, self.checkpoint)
            if moved is None:
                name = f"If the data was moved, name it: `flatout eval {in_shell(self.folder)} --data PATH`."
                raise DataError(error.what, fix=f"{error.fix} {name}") from error
            self.progress.say(
                f"{error.what} The same data was found at {', '.join(moved.mix or [moved.path or ''])}."
            )
            return open_data(moved, progress=self.progress)


def load_run(
    run: str | Path,
    checkpoint: str = "best",
    *,
    device: str = "auto",
    precision: Arithmetic = "fp32",
    trust_code: bool = False,
    progress: Progress = SILENT,
) -> LoadedRun:
    """Return the model of a run with the weights of a checkpoint (`best`, `last` or a step), its
    tokenizer and its data set.

    It has the speedups it was trained with, as far as they work here, but none that compiles. With
    `precision="fp32"` it has none that narrows its arithmetic either; `"trained"` keeps those, so
    that `scoring.evaluate` finds the loss that the run found. `trust_code` lets it import code of
    its own that its config.yaml names, now and later.
    Raises: CheckpointError, DataError or ConfigError when one of them cannot be used;
            UntrustedCode, before anything is imported.
    """
    folder = find_run(run)
    config = trusted_config(folder, trust_code=trust_code)
    if config is None or (config.data.path is None and config.data.mix is None):
        raise CheckpointError(
            f"{folder}/config.yaml names no data set.",
            fix="Use the folder of a run that `flatout train` made.",
        )
    path = find_checkpoint(folder, checkpoint, progress=progress)
    where, _ = pick_device(device, probe())
    with progress.task(f"Loading {path.name} of {folder.name}"):
        recipe = assemble(_usable_speedups(config, precision))
        model_class, model_config = model_of(config)
        model = model_class(model_config, ops_of(recipe))
        try:
            model.load_state_dict(read_weights(path))
        except (
            RuntimeError
        ) as error:  # torch lists every tensor; the first line below its heading is enough
            first = str(error).partition("\n")[2].partition("\n")[0].strip() or str(error)
            raise CheckpointError(
                f"The weights of {path} are not those of the model in {folder}/config.yaml: {first}",
                fix="Restore config.yaml from a copy.",
            ) from error
        model.to(where).eval()
        tokenizer = load_tokenizer(folder / TOKENIZER, sha256=tokenizer_of(path))
    return LoadedRun(model, tokenizer, config, recipe, folder, path, progress)


def _usable_speedups(config: RunConfig, precision: Arithmetic) -> Iterator[Decision]:
    """Yield the run's own speedups that also work here: a model trained on a GPU can be tried on a
    laptop.
    """
    machine = probe()
    names = () if isinstance(config.speedups, str) else config.speedups
    for name in names:
        left_out = precision == "fp32" and _narrows(SPEEDUPS.get(name))
        if not left_out and SPEEDUPS.get(name).reason_against(machine, config) is None:
            yield Decision(name, True, "as trained")


def _narrows(speedup: Speedup) -> bool:
    """Say whether a speedup sets a precision below fp32, or needs one that does: it works in that
    precision only.
    """
    return "precision" in speedup.fills or any(
        _narrows(SPEEDUPS.get(name)) for name in speedup.needs
    )
