"""A checkpoint to export: its config, its tokenizer, and its weights, read one at a time."""

from __future__ import annotations

import math
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
from flatout.training.checkpoint.catalog import tokenizer_of
from flatout.training.checkpoint.merged import MergedWeights, shapes_of
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
    weights: MergedWeights
    """Reads the weights, with the adapters of a LoRA run."""
    dtype: torch.dtype | None
    """The type to convert weights to. None keeps that of the checkpoint."""

    def converted(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight, or a part of it, in the type of the export.

        Shapes:  any, unchanged.
        Raises:  CheckpointError when a number is too large for the type.
        """
        result = weight.to(self.dtype_of(name))
        if result.dtype == torch.float16 and result.isinf().any() and weight.isfinite().all():
            raise CheckpointError(
                f"{name} contains numbers that float16 cannot express: they are above 65,504.",
                fix="Export with --dtype bfloat16, or without --dtype.",
            )
        return result

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of one weight in the export. Only floating-point ones are converted."""
        stored = self.weights.dtype_of(name)
        return self.dtype if self.dtype and stored.is_floating_point else stored

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return int(self.checkpoint.name.removeprefix("step-"))

    @property
    def num_parameters(self) -> int:
        """The number of weights. Shared ones count once."""
        return sum(map(math.prod, self.weights.shapes.values()))

    @property
    def num_bytes(self) -> int:
        """The size of all weights in the export."""
        return sum(
            math.prod(shape) * self.dtype_of(name).itemsize
            for name, shape in self.weights.shapes.items()
        )


def open_source(
    run: str | Path,
    checkpoint: str | None = None,
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
    weights = MergedWeights(path)
    wanted = shapes_of(model_class.on_meta(model_config, Ops.plain()))
    stored = weights.shapes
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
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
        weights=weights,
        dtype=DTYPES[dtype] if dtype else None,
    )
