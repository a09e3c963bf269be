"""Find out what a model from elsewhere is: its architecture and the keys under `model.`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from flatout.config.registry import ARCHITECTURES
from flatout.errors import CheckpointError, ConfigError
from flatout.models.families.exported import MODEL_TYPE
from flatout.models.families.files import (
    GET_AGAIN,
    SAFETENSORS,
    candidates,
    open_tensors,
    optimizer_state,
    plain_name,
)
from flatout.models.families.hub import CONFIG, PREFIX, model_folder
from flatout.models.families.table import OTHER_MODEL, SAME, Architecture, Shapes, TensorMap
from flatout.models.language_model import LanguageModel
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import JsonObject, read_object
from flatout.storage.recognised import ADAPTER, LITGPT, TORCH_FILE, kind_of, recognise
from flatout.storage.streams import shortened

CONFIGURED = (SAFETENSORS, ".bin")
"""Endings of files that a config.json beside them describes."""
RESTORE = "Restore config.json from the model's repository."
MOST_NAMED = 3
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The fields of AdamW's state with the shape of a parameter."""
UNKNOWN = "are not AdamW's of these parameters in a known order"
HEADS = ("unembedding.weight", "token_embedding.weight")
"""The output head of flatout's models. A tied model has only the second."""


@dataclass(frozen=True)
class ForeignModel:
    """A model that another tool saved."""

    path: Path
    architecture: Architecture | None
    """None if its tensors have the names of the run's own model, whatever that is."""
    keys: JsonObject
    """The keys under `model.`, with `kind` and `vocab_size`. Empty without an architecture."""


def is_foreign(init_from: str) -> bool:
    """Return whether `train.init_from` names a model that another tool saved.

    Only the file or directory itself decides, not the files next to it.
    """
    if init_from.startswith(PREFIX):
        return True
    path = Path(init_from)
    if path.is_dir():
        is_own = kind_of(path) in ("run", "checkpoint", "dataset")
        return not is_own and ((path / CONFIG).exists() or bool(candidates(path)))
    known = recognise(path)
    return path.is_file() and (
        (path.suffix == SAFETENSORS and kind_of(path.parent) != "checkpoint")
        or (known is not None and known.name == TORCH_FILE)
    )


def find_model(
    init_from: str, *, whole: bool = True, for_run: bool = False, progress: Progress = SILENT
) -> ForeignModel:
    """Return what `train.init_from` names. A model of the hub is downloaded.

    Without `whole`, only its config.json is. With `for_run`, it may be one of no known
    architecture: the run's own model decides which tensors it has.

    Raises: CheckpointError when a file is missing or cannot be read; ConfigError when flatout has
            no such architecture; MissingPackage.
    """
    path = Path(init_from)
    if init_from.startswith(PREFIX):
        path = model_folder(init_from, whole=whole, progress=progress)
    known = recognise(path)
    if known is not None and known.name in (ADAPTER, LITGPT):
        raise CheckpointError(known.instead_of("a model that flatout reads"), fix=known.fix)
    config = (path if path.is_dir() else path.parent) / CONFIG
    families = [ARCHITECTURES.get(name) for name in ARCHITECTURES.names()]
    is_configured = config.is_file() and (path.is_dir() or path.suffix in CONFIGURED)
    document = read_object(config, kind=CheckpointError, fix=RESTORE) if is_configured else {}
    try:
        if not {"model_type", "architectures"} & document.keys():
            files = open_tensors(path)
            for family in families:
                if (keys := family.recognise(files.shapes, files.others)) is not None:
                    return ForeignModel(path, family, _possible(keys, path, files.shapes))
            if for_run:
                return ForeignModel(path, None, {})
            raise _unknown(path, files.shapes)
        kind = document.get("model_type")
        if "auto_map" in document and kind != MODEL_TYPE:
            raise ConfigError(
                f"{config} names code that defines the model (auto_map), but flatout never "
                "executes code of a model's directory.",
                fix="Start from a different model. If the model is one of the architectures of "
                "docs/base-models.md, delete auto_map from config.json.",
            )
        if "quantization_config" in document:
            raise ConfigError(
                f"The weights of {path} are quantised (quantization_config in config.json).",
                fix="Start from the weights before quantisation.",
            )
        family = next((family for family in families if kind in family.classes), None)
        if family is None:
            named = f"is of the architecture {kind!r}" if kind else f"has no model_type in {CONFIG}"
            experts = ", a mixture of experts" * any("expert" in key for key in document)
            raise ConfigError(
                f"The base model {named}{experts}, which flatout does not read.", fix=OTHER_MODEL
            )
        keys = family.keys(document)
        if whole or not init_from.startswith(PREFIX):
            _possible(keys, path, open_tensors(path).shapes)
        return ForeignModel(path, family, keys)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{config if document else path} has a value of the wrong type or size: {error}.",
            fix=RESTORE if document else GET_AGAIN,
        ) from error


def _possible(keys: JsonObject, path: Path, shapes: Shapes) -> JsonObject:
    """Return `model.` keys, after checking that a model of their size can have these tensors.

    Raises: ConfigError: the model is not built.
    """
    rows = keys["num_layers"] + keys["vocab_size"] + (keys.get("d_ff") or 0)
    least, there = keys["d_model"] * rows, sum(map(math.prod, shapes.values()))
    if least > there:
        raise ConfigError(
            f"{path} states a model of at least {least:,} parameters, and its tensors have "
            f"{there:,}.",
            fix="Restore its files.",
        )
    return keys


def _unknown(path: Path, shapes: Collection[str], problem: str = "") -> CheckpointError:
    first = shortened(sorted(shapes), MOST_NAMED)
    return CheckpointError(
        f"The tensors of {path} ({first}) do not tell its architecture{problem}.",
        fix="If it is a module of your own, adapt it (docs/extend.md), and set model.kind and its "
        "keys. If it has a config.json, put both into one directory, with the weights as "
        f"model.safetensors or pytorch_model.bin. {OTHER_MODEL}",
    )


class ForeignWeights:
    """The tensors of a foreign model under flatout's names, each computed when it is asked for."""

    def __init__(self, found: ForeignModel, model: LanguageModel) -> None:
        """Open the files of a model. `model` is flatout's, on any device."""
        self.path = found.path
        self._files = open_tensors(found.path)
        self._family = family = found.architecture
        self._also: dict[str, tuple[str, ...]] = {}
        """Other names under which files may have a tensor: a file may omit one of two."""
        maps = family.tensors(model.config) if family else self._own_maps(model)
        self._maps = {one.name: one for one in maps}
        if family is not None and HEADS[0] not in self._maps and HEADS[1] in self._maps:
            self._also[self._maps[HEADS[1]].foreign[0]] = family.heads

    def _own_maps(self, model: LanguageModel) -> list[TensorMap]:
        """Return the tensors of the run's own model, whose names the files have."""
        names: dict[int, list[str]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        starts = {plain_name(name).partition(".")[0] for own in names.values() for name in own}
        there = {"".join(name.partition(".")[:2]) for name in self._files.shapes}
        prefix, maps = there.pop() if len(there) == 1 else "", []  # the attribute with the model
        prefix *= prefix[-1:] == "." and prefix[:-1] not in starts
        for own in names.values():
            first, *others = (prefix + plain_name(name) for name in own)
            self._also[first] = tuple(others)
            maps.append(TensorMap(own[0], (first,), *SAME))
        return maps

    def names(self) -> list[str]:
        """Return the names of the tensors, those of flatout's model."""
        return list(self._maps)

    def read(self, name: str) -> Tensor:
        """Return a tensor by its name in flatout's model, in at least fp32.

        Shapes: as in the model.
        Raises: CheckpointError when it cannot be read, or has NaN or infinite values.
        """
        one = self._maps[name]
        parts = []
        for foreign in one.foreign:
            parts.append(self._files.read(self._stored(foreign)))
            if not torch.isfinite(parts[-1]).all():
                raise CheckpointError(
                    f"{foreign} of {self.path} contains values that are not finite.",
                    fix="Start from a different model: this one is damaged, or its training "
                    "diverged.",
                )
        return one.join(parts)

    def moments(self, names: Iterable[str]) -> dict[str, JsonObject] | str | None:
        """Return AdamW's state of the parameters of flatout's model, by `names` in its order.

        An optimizer numbers parameters in the order of their model, with matrices before vectors if
        it has two groups.

        Returns: None without an optimizer. If its state cannot be taken, the end of a sentence that
                 says why.
        """
        shapes = self._files.shapes
        try:
            state = optimizer_state(self.path, self._files.others)
        except CheckpointError as error:
            return f"cannot be read: {error.what.rstrip('.')}"
        if state is None:
            is_last = (self.path / "training_args.bin").exists()
            return "are in its checkpoints, not beside the final model" if is_last else None
        if isinstance(state, list):
            return f"are of {len(state)} optimizers"
        try:
            groups = state["param_groups"]
            kept = [state["state"][number] for group in groups for number in group["params"]]
            parts = {name: [*map(self._stored, self._maps[name].foreign)] for name in names}
            order = [*chain(*parts.values())]
            if len(groups) == 2:
                order.sort(key=lambda part: len(shapes[part]) < 2)
            found = dict(zip(order, kept, strict=True))
            pairs = [(found[part][key], shapes[part]) for part in found for key in MOMENTS]
            # transformers has the biases of queries before the norms
            has_biases = any("q_proj.bias" in part for part in order)
            if has_biases or len(groups) > 2 or any(one.shape != shape for one, shape in pairs):
                return UNKNOWN
            if not all(moment.isfinite().all() for moment, _ in pairs) or not all(
                one["exp_avg_sq"].min() >= 0 <= one["step"] < math.inf for one in kept
            ):
                return "are not finite, or negative"
            return {
                name: {
                    key: self._maps[name]
                    .join([found[part][key] for part in own])
                    .clone(memory_format=torch.contiguous_format)
                    for key in MOMENTS
                }
                | {"step": found[own[0]]["step"]}
                for name, own in parts.items()
            }
        except Exception:  # the file may contain anything in its place
            return UNKNOWN

    def require_fit(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check that every tensor of flatout's model, with these shapes, has its values here.

        Cost:   reads the output head, and its copies in the files.
        Raises: CheckpointError naming the first tensors that are missing, unknown or of a different
                shape, or an output head that is not the one that the model would use.
        """
        assert shapes.keys() == self._maps.keys()  # a table that lacks a tensor is a bug of ours
        wanted: dict[str, tuple[int, ...] | None] = {}
        for name, one in self._maps.items():
            stored = map(self._stored, one.foreign)
            if one.split is None:  # only `join` knows them
                wanted |= dict.fromkeys(stored)
            else:
                parts = one.split(torch.empty(shapes[name], device="meta"))
                wanted |= zip(stored, (tuple(part.shape) for part in parts), strict=True)
        there, family = self._files.shapes, self._family
        known = family.heads if family else [one for also in self._also.values() for one in also]
        ignored = family.ignored if family else ()
        heads = [name for name in known if name in there and name not in wanted]
        problems = [f"it has no {name}" for name in wanted if name not in there]
        problems += [
            f"{name} is {list(there[name])}, and its configuration means {list(shape)}"
            for name, shape in wanted.items()
            if shape is not None and there.get(name, shape) != shape
        ]
        problems += [
            f"it has {name}, which the architecture lacks"
            for name in there
            if name not in {*wanted, *heads}
            and not any(re.fullmatch(pattern, name) for pattern in ignored)
        ]
        if problems and family is None:
            raise _unknown(self.path, there, f", nor is it this run's model: {problems[0]}")
        if problems:
            listed = shortened(problems, MOST_NAMED, "; ")
            own_head = self._maps[HEADS[0]].foreign[0] if HEADS[0] in self._maps else ""
            raise CheckpointError(
                f"The tensors of {self.path} do not fit its configuration: {listed}.",
                fix="If the model uses its embedding as the output head, set tie_word_embeddings "
                f"to true in its config.json. Otherwise get the file with {own_head}."
                if problems == [f"it has no {own_head}"]
                else "Get all files again from where the model was published.",
            )
        own = next((key for key in HEADS if key in self._maps), "")
        for name in heads if family else ():
            if not torch.equal(self._files.read(name), self.read(own)):
                source = "the embedding" if own == HEADS[1] else self._maps[own].foreign[0]
                raise CheckpointError(
                    f"{self.path} has an output head, {name}, with other values than {source}, "
                    "which its configuration makes the head.",
                    fix="If the model has a separate head, set tie_word_embeddings to false in "
                    f"its config.json. Otherwise remove {name}."
                    if self._family and self._family.classes
                    else OTHER_MODEL,
                )

    def _stored(self, name: str) -> str:
        """Return the name in the files, which may lack the family's prefix."""
        prefix = self._family.prefix if self._family else ""
        names = (name, name.removeprefix(prefix), *self._also.get(name, ()))
        return next((one for one in names if one in self._files.shapes), name)
