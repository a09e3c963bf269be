"""The weights that a checkpoint stands for, one at a time. LoRA adapters are merged into them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from flatout.config.registry import MODELS
from flatout.distributed.tensor import boxes_of
from flatout.errors import CheckpointError
from flatout.models.families.source import ForeignWeights, find_model, is_foreign
from flatout.models.language_model import LanguageModel
from flatout.models.lora import INSIDE, Delta, merge
from flatout.ops import Ops
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import RESTORE, parsing
from flatout.training.checkpoint import catalog, tensors
from flatout.training.checkpoint.catalog import Base, read_index
from flatout.training.checkpoint.contents import WEIGHTS, find_base
from flatout.training.checkpoint.weights import cuts_of, initial_weights, weights_and_aliases


class _BaseModelWeights:
    """Reads the weights of another tool's model by flatout's names, as `MergedWeights` does."""

    def __init__(self, path: Path) -> None:
        found = find_model(str(path))
        model_class = MODELS.get(found.keys["kind"])
        own = {key: value for key, value in found.keys.items() if key != "kind"}
        config = model_class.check(own, seq_len=1)
        model = model_class.on_meta(config, Ops.plain())
        self.shapes = shapes_of(model)
        self.aliases: dict[str, str] = {}
        self.read = ForeignWeights(found, model).read


class MergedWeights:
    """Reads the weights of a checkpoint by their names in the model's state_dict.

    The weights of a LoRA checkpoint are those of its base plus its adapters. `read` needs memory
    for one tensor, and the adapters are kept, so that a model of any size can be copied. The caller
    has verified the files of the checkpoint, and `find_base` verifies those of a base.
    Raises: CheckpointError when the base is missing or has changed.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        index = read_index(checkpoint)
        self._index = {
            name.removeprefix(WEIGHTS): entry
            for name, entry in index.tensors.items()
            if name.startswith(WEIGHTS)
        }
        self._aliases = {
            alias.removeprefix(WEIGHTS): name.removeprefix(WEIGHTS)
            for alias, name in index.aliases.items()
        }
        self._base: MergedWeights | _BaseModelWeights | None = None
        self._deltas: Mapping[str, list[Delta]] = {}
        if base := index.base:
            path = find_base(checkpoint, base)
            self._base = _BaseModelWeights(path) if is_foreign(str(path)) else MergedWeights(path)
            with parsing(checkpoint / catalog.INDEX):
                self._deltas = _deltas(base, self.stored())
            self._check_rows(base)

    def _check_rows(self, base: Base) -> None:
        """Check that every stored adapter has rows, which its weight has.

        Raises: CheckpointError.
        """
        whole = self.shapes
        adapters = {name.rpartition(".")[0] for name in self._index if INSIDE in name}
        for name in sorted(adapters | base.rows.keys()):
            shape = whole.get(f"{name.partition(INSIDE)[0]}.weight", (0,))
            first, end = base.rows.get(name, (0, 0))
            if not first < end <= shape[0]:
                raise CheckpointError(
                    f"{self.checkpoint / catalog.INDEX} is damaged: the rows of {name} are not "
                    "those of its weight.",
                    fix=RESTORE,
                )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight. Shared ones count once."""
        own = {name: entry.shape for name, entry in self._index.items() if INSIDE not in name}
        return (self._base.shapes if self._base else {}) | own

    @property
    def aliases(self) -> dict[str, str]:
        """The other names of shared weights, such as that of a tied head."""
        return (self._base.aliases if self._base else {}) | self._aliases

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type of one weight. With adapters, all are fp32."""
        return torch.float32 if self._base else tensors.dtype_of(self._index[name])

    def read(self, name: str) -> Tensor:
        """Return one weight, unsharded, on the CPU.

        Shapes:  as in `shapes`.
        """
        own = self._base is None or name in self._index
        weight = self._own(name) if own or self._base is None else self._base.read(name)
        return merge(name, weight, self._deltas)

    def stored(self) -> dict[str, Tensor]:
        """Return what the checkpoint itself has, unsharded: of LoRA, the adapters.

        Shapes:  as in the model.
        """
        return {name: self._own(name) for name in self._index}

    def _own(self, name: str) -> Tensor:
        weight = tensors.empty(self._index[name])
        key = WEIGHTS + name
        tensors.fill({key: weight}, {key: self._index[name]}, self.checkpoint)
        return weight


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a model, as `MergedWeights.shapes`."""
    weights = weights_and_aliases(model)[0].items()
    return {name.removeprefix(WEIGHTS): tuple(tensor.shape) for name, tensor in weights}


def read_merged(checkpoint: Path, weights: MergedWeights | None = None) -> dict[str, Tensor]:
    """Return every weight, unsharded, by its name in the model's state_dict.

    `weights` are those of the checkpoint, if they are open: opening verifies the files of a base.

    Shapes: as in the model.
    Raises: CheckpointError as `MergedWeights`.
    """
    weights = weights or MergedWeights(checkpoint)
    found = {name: weights.read(name) for name in weights.shapes}
    return found | {alias: found[name] for alias, name in weights.aliases.items()}


def load_initial_weights(core: LanguageModel, source: Path, progress: Progress = SILENT) -> None:
    """Copy the weights of a checkpoint, or of another tool's model, into a newly built model.

    Every rank calls it and keeps its part. Memory: one tensor at a time, besides the model.

    Raises: CheckpointError when a tensor cannot be read or has a different shape.
    """
    weights = (
        ForeignWeights(find_model(str(source), for_run=True), core)
        if is_foreign(str(source))
        else MergedWeights(source)
    )
    targets = initial_weights(core)
    cuts = cuts_of(core, targets)
    size = sum(target.numel() for target in targets.values())
    title = f"Loading the weights of {source.name}"
    with progress.task(title, total=size) as task, torch.no_grad():
        for key, target in targets.items():
            name = key.removeprefix(WEIGHTS)
            values = weights.read(name)
            if values.shape != target.shape:
                raise CheckpointError(
                    f"{name} of {source} has the shape {list(values.shape)} and the model's "
                    f"{list(target.shape)}.",
                    fix="Get all files again from where the model was published.",
                )
            for start, part in boxes_of(target, cuts.get(key)):
                box = zip(start, part.shape, strict=True)
                part.copy_(values[tuple(slice(low, low + count) for low, count in box)])
            task.advance(target.numel())


def _deltas(base: Base, adapters: Mapping[str, Tensor]) -> dict[str, list[Delta]]:
    """Return what the adapters add, by the name of the weight."""
    found: dict[str, list[Delta]] = {}
    for name, rows in base.rows.items():
        pair = (adapters[f"{name}.lora_A"], adapters[f"{name}.lora_B"])
        weight = f"{name.partition(INSIDE)[0]}.weight"
        found.setdefault(weight, []).append(Delta(rows, *pair, base.scale))
    return found
