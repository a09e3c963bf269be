"""A checkpoint to export: its config, its tokenizer, and its weights, read one at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flatout.config.schema import RunConfig
from flatout.data.store.manifest import TOKENIZER
from flatout.data.tokenizers import Tokenizer, load_tokenizer
from flatout.errors import CheckpointError
from flatout.models.language_model import LanguageModel, LanguageModelConfig, model_of
from flatout.ops import Ops
from flatout.progress import SILENT, Progress
from flatout.training.checkpoint import tensors
from flatout.training.checkpoint.base import WEIGHTS
from flatout.training.checkpoint.catalog import Entry, read_index, tokenizer_of
from flatout.training.checkpoint.merged import MergedWeights
from flatout.training.checkpoint.read_write import stored_weights
from flatout.training.checkpoint.weights import weights_and_aliases
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import find_checkpoint, find_run

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The types that weights can be converted to."""


@dataclass(frozen=True)
class Source:
    """A complete checkpoint of a run."""

    folder: Path
    checkpoint: Path
    config: RunConfig
    model_class: type[LanguageModel]
    model: LanguageModelConfig
    tokenizer: Tokenizer
    entries: Mapping[str, Entry]
    """The dtype and shape of every weight, once, by its name in the model's state_dict."""
    dtype: torch.dtype | None
    """The type to convert weights to; None keeps that of the checkpoint."""
    merged: MergedWeights | None = None
    """Reads the weights of a LoRA run, with its adapters."""

    def read(self, name: str) -> Tensor:
        """Return one weight as stored, unsharded; that of a LoRA run with its adapters.

        The files are open only meanwhile: pages of a mapped file count as memory in use.

        Shapes:  as in the model.
        Raises:  CheckpointError when its file cannot be read.
        """
        if self.merged is not None:
            return self.merged.read(name)
        entry = self.entries[name]
        key = f"{WEIGHTS}{name}"
        weight = tensors.empty(entry)
        tensors.fill({key: weight}, {key: entry}, self.checkpoint)
        return weight

    def converted(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight, or a part of it, in the type of the export.

        Shapes:  any, unchanged.
        Raises:  CheckpointError when a number is too large for the type.
        """
        result = weight.to(self.dtype_of(name))
        if result.dtype == torch.float16 and result.isinf().any() and weight.isfinite().all():
            raise CheckpointError(
                f"{name} has numbers that float16 cannot express: they are above 65,504.",
                fix="Export with --dtype bfloat16, or without --dtype.",
            )
        return result

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of one weight in the export; only floating-point ones are converted."""
        stored = tensors.dtype_of(self.entries[name])
        return self.dtype if self.dtype and stored.is_floating_point else stored

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return int(self.checkpoint.name.removeprefix("step-"))

    @property
    def num_parameters(self) -> int:
        """The number of weights; shared ones count once."""
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    @property
    def num_bytes(self) -> int:
        """The size of all weights in the export."""
        return sum(
            math.prod(entry.shape) * self.dtype_of(name).itemsize
            for name, entry in self.entries.items()
        )


def open_source(
    run: str | Path,
    checkpoint: str = "best",
    *,
    dtype: str | None = None,
    trust_code: bool = False,
    progress: Progress = SILENT,
) -> Source:
    """Return a checkpoint of a run (`best`, `last` or a step), after checking its weights.

    Raises: CheckpointError, DataError or ConfigError when the run, checkpoint or tokenizer cannot
            be used; UntrustedCode before any custom code is imported.
    """
    folder = find_run(run)
    config = trusted_config(folder, trust_code=trust_code)
    assert config is not None, "find_run found its config.yaml"
    path = find_checkpoint(folder, checkpoint, progress=progress)
    model_class, model_config = model_of(config)
    entries = {name.removeprefix(WEIGHTS): entry for name, entry in stored_weights(path).items()}
    merged = MergedWeights(path) if read_index(path).base is not None else None
    if merged is not None:
        entries = {
            name: Entry(dtype="float32", shape=shape, slices=())
            for name, shape in merged.shapes.items()
        }
    wanted = weights_and_aliases(model_class.on_meta(model_config, Ops.plain()))[0]
    shapes = {name.removeprefix(WEIGHTS): tuple(one.shape) for name, one in wanted.items()}
    stored = {name: entry.shape for name, entry in entries.items()}
    for name in sorted(shapes.keys() | stored.keys()):
        if shapes.get(name) != stored.get(name):
            raise CheckpointError(
                f"The weights of {path} do not fit the model in {folder}/config.yaml: {name}.",
                fix="Restore config.yaml from a copy.",
            )
    return Source(
        folder=folder,
        checkpoint=path,
        config=config,
        model_class=model_class,
        model=model_config,
        tokenizer=load_tokenizer(folder / TOKENIZER, sha256=tokenizer_of(path)),
        entries=entries,
        dtype=DTYPES[dtype] if dtype else None,
        merged=merged,
    )
