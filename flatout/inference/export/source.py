"""A checkpoint to export: its config, its tokenizer, and its weights, read one at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from flatout.config.schema import RunConfig
from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.templates import CHAT_TEMPLATE, ChatTemplate, load_template
from flatout.data.store.manifest import TOKENIZER
from flatout.data.tokenizers import Tokenizer, load_tokenizer
from flatout.errors import CheckpointError
from flatout.inference.load import require_fit
from flatout.models.language_model import LanguageModelConfig, model_of
from flatout.ops import Ops
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import read_json
from flatout.training.checkpoint.catalog import step_of, tokenizer_of
from flatout.training.checkpoint.merged import MergedWeights
from flatout.training.init_from import run_of
from flatout.training.run_dir.layout import read_config, trusted_config
from flatout.training.run_dir.lookup import find_checkpoint, find_run

GENERATION = "generation_config.json"
"""What generation needs to know of a model, such as the tokens that end it."""


@dataclass(frozen=True)
class Source:
    """A complete checkpoint of a run."""

    folder: Path
    checkpoint: Path
    config: RunConfig
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

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template that the run was trained with, if any."""
        return load_template(self.folder / CHAT_TEMPLATE)

    @property
    def stop_ids(self) -> list[int]:
        """The ids after which generation ends: of a text, of a turn, and those of its base."""
        special = self.tokenizer.special_tokens()
        turn = self.template and Renderer(self.template, tuple(special)).end_token
        ends = [self.tokenizer.eot_id, *([special[turn]] if turn else [])]
        base = _stop_ids_of(self.config.train.init_from)
        known = [index for index in range(self.tokenizer.vocab_size) if index in base]
        return [*ends, *known]

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return step_of(self.checkpoint)

    @property
    def num_parameters(self) -> int:
        """The number of weights. Shared ones count once."""
        return sum(map(math.prod, self.weights.shapes.values()))


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
    require_fit(weights, model_class.on_meta(model_config, Ops.plain()), folder)
    return Source(
        folder=folder,
        checkpoint=path,
        config=config,
        model=model_config,
        tokenizer=load_tokenizer(folder / TOKENIZER, sha256=tokenizer_of(path)),
        weights=weights,
        dtype=getattr(torch, dtype) if dtype else None,
    )


def _stop_ids_of(init_from: str | None) -> list[object]:
    """Return the ids that end generation in another tool's model, from which runs started.

    There are none if its files are no longer there.
    """
    while init_from is not None:
        path = Path(init_from)
        folder = path if path.is_dir() else path.parent
        for file in (folder / GENERATION, folder / "config.json"):
            found = read_json(file) if file.is_file() else None
            if isinstance(found, dict) and "eos_token_id" in found:
                ids = found["eos_token_id"]
                return ids if isinstance(ids, list) else [ids]
        run = run_of(path)
        config = read_config(run) if run else None
        init_from = config.train.init_from if config else None
    return []
