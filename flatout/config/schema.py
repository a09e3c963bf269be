"""RunConfig: everything a run depends on, in frozen sections that reject unknown keys.

A config has three layers: the defaults in `sections.py`, a recipe's YAML, and `section.key=value`
overrides. Alternative keys (`train.steps`, `train.tokens`, `train.epochs`) replace each other
between layers. Names of models, optimizers and speedups are looked up when the run is built. `auto`
is resolved once, when a run starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from flatout.config import trust
from flatout.config.documents import parse_yaml, read_document
from flatout.config.messages import ForeignKeys, fields_of
from flatout.config.messages import explain as explain
from flatout.config.registry import recipe_path
from flatout.config.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ScheduleConfig,
    Section,
    TrainConfig,
)
from flatout.config.signature import texts
from flatout.errors import ConfigError, in_shell
from flatout.storage.json_io import JsonObject

FORMAT_VERSION = 1

ALTERNATIVES = (
    {"data.path", "data.mix"},
    {"train.steps", "train.tokens", "train.epochs"},
    {"train.eval_every", "train.eval_every_epochs"},
    {"checkpoint.every_steps", "checkpoint.every_minutes", "checkpoint.every_epochs"},
)
"""Groups of alternative keys: setting one in a later layer clears the others."""

MAPPINGS = {"data.mix"}
"""Keys whose value is a mapping, which a later layer replaces as a whole."""

BATCH_SIZES = {"tokens_per_step", "rows_per_device", "accumulate"}
"""Two of them determine the third: a layer that sets two clears the third in the layers below."""


def _stated_together(group: set[str], run: RunConfig) -> str:
    stated = sorted(key for key in group if run.value(key) not in (None, 0))
    return " and ".join(stated) if len(stated) > 1 else ""


class RunConfig(Section):
    """The complete config of a run."""

    rules = (
        (
            lambda run: run.format_version > FORMAT_VERSION,
            "This config has format_version {0.format_version}. This version of flatout reads up "
            f"to {FORMAT_VERSION}.",
            "Install a newer flatout.",
        ),
        (
            lambda run: run.schedule.min_lr > run.optim.lr and run.optim.lr / 10,
            "schedule.min_lr={0.schedule.min_lr:g} is above optim.lr={0.optim.lr:g}.",
            "Set schedule.min_lr={1:g}.",
        ),
        *(
            (
                partial(_stated_together, group),
                "{1} cannot be set together.",
                f"Keep one of {', '.join(sorted(group))}.",
            )
            for group in ALTERNATIVES
        ),
        (
            lambda run: run.lora.rank is not None and run.optim.kind == "muon",
            "optim.kind=muon orthogonalises the updates of whole weights, and lora.rank trains "
            "factors of updates.",
            "Set optim.kind=adamw.",
        ),
        (
            lambda run: run.parallel.tensor > 1 and run.parallel.context > 1,
            "parallel.tensor={0.parallel.tensor} and parallel.context={0.parallel.context} cannot "
            "be set together: both divide the tokens of each row.",
            "Remove one of them.",
        ),
        (
            lambda run: run.batch.by_tokens and (run.parallel.per_row > 1 or run.data.mix),
            "batch.by_tokens=true excludes data.mix and parallel.tensor, context and pipeline.",
            "Remove batch.by_tokens, or the other key.",
        ),
        (
            lambda run: run.parallel.tensor * run.parallel.pipeline > 1 and run.lora.rank,
            "parallel.tensor and parallel.pipeline do not support lora.rank={1}.",
            "Remove one of them.",
        ),
        (
            lambda run: run.parallel.pipeline > 1 and run.parallel.offload == "cpu",
            "parallel.pipeline={0.parallel.pipeline} and parallel.offload=cpu cannot be set "
            "together: a pipeline keeps the gradients of a whole step on the GPU.",
            "Remove one of them.",
        ),
    )

    format_version: int = FORMAT_VERSION
    """Version of the config format."""
    name: str = "run"
    """Name of the recipe. The default name of the run directory starts with it."""
    model: ModelConfig = ModelConfig()
    """The model."""
    data: DataConfig = DataConfig()
    """The data."""
    batch: BatchConfig = BatchConfig()
    """The batch."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate schedule."""
    train: TrainConfig = TrainConfig()
    """Length, device and precision."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    log: LogConfig = LogConfig()
    """Metrics."""
    parallel: ParallelConfig = ParallelConfig()
    """Distributed training."""
    speedups: str | tuple[str, ...] = "auto"
    """auto, none, a list of names, or edits of auto, such as auto,-compile."""

    @property
    def dropout(self) -> float:
        """The share that is dropped at random in the model, or else in its adapters."""
        return float(self.model.own().get("dropout") or self.lora.dropout)

    def value(self, key: str) -> Any:
        """Return the value at a dotted key, such as `optim.lr`."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def to_dict(self) -> JsonObject:
        """Return the config as plain values for YAML and JSON.

        Without adapters there is no section `lora`, so that files and names of runs are those of
        versions that had none.
        """
        left_out = {"lora"} if self.lora.rank is None else None
        return self.model_dump(mode="json", exclude=left_out)

    def references(self) -> frozenset[str]:
        """Return every `package.module:attribute` that using this config imports."""
        return trust.references_in(self.to_dict())

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON as 64 hexadecimal characters."""
        document = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()

    def stated(self) -> frozenset[str]:
        """Return the keys that a file, an override or Python code has set, as dotted keys."""
        return frozenset(flat(self.model_dump(exclude_unset=True)))

    def with_values(self, values: JsonObject) -> RunConfig:
        """Return a validated copy with the values at some dotted keys replaced."""
        document = self.model_dump(mode="json", exclude_unset=True)
        merge(document, nested(values))
        return validate(document)


def load_config(
    recipe: str | Path | RunConfig | None = None,
    overrides: Iterable[str] | None = None,
    *,
    trust_code: bool = False,
) -> RunConfig:
    """Return the config of a recipe (a name, a YAML path, or None for the defaults) and overrides.

    A config that was built in Python only gets the overrides.

    A recipe inside a run directory is part of that run, so code that it names needs `trust_code`.

    Raises: ConfigError for an unknown recipe, key or value, with the nearest name; UntrustedCode.
    """
    if isinstance(recipe, RunConfig):
        return recipe.with_values(parse_overrides(overrides, RunConfig))
    path = recipe_path(recipe) if recipe is not None else None
    document: JsonObject = {"name": path.stem} | read_recipe(path) if path else {}
    layer = nested(parse_overrides(overrides, RunConfig))
    stated = {key for key in BATCH_SIZES if flat(layer).get(f"batch.{key}") is not None}
    if len(stated) == 2 and isinstance(document.get("batch"), dict):
        document["batch"].pop((BATCH_SIZES - stated).pop(), None)
    merge(document, layer)
    try:
        config = validate(document)
    except ConfigError as error:
        try:
            if path:
                validate(read_recipe(path), file=path)
        except ConfigError as own:  # with the path of the recipe, unless an override causes it
            if own.what == f"{path}: {error.what}":
                raise own from error
        raise
    if path and not trust_code:
        for folder in filter(trust.is_run_folder, {path.parent, path.resolve().parent}):
            trust.require_trusted(folder, config.references(), named=trust.references_in(layer))
    return config


def read_recipe(path: Path) -> JsonObject:
    """Return the settings in a YAML file. Of a run's config.yaml they are the resolved ones.

    Raises: ConfigError.
    """
    document = read_document(path)
    found = document.get("resolved")
    return found if isinstance(found, dict) else document


def parse_overrides(overrides: Iterable[str] | None, section: type[BaseModel]) -> JsonObject:
    """Return the values of overrides by dotted key, without checking the keys.

    The value of a text key is text as it is, quotes, `#` and blanks included, and null or nothing
    is no value. Text for a list of names may also be a list in brackets. Any other value is YAML.
    Raises: ConfigError when an item is not an override.
    """
    values: JsonObject = {}
    for override in texts(overrides):
        key, equals, text = override.partition("=")
        key, stripped = key.strip(), text.strip()
        if not equals or not all(key.split(".")):
            raise ConfigError(
                f"{override!r} is not an override.",
                fix="Write section.key=value, for example optim.lr=3e-4.",
            )
        kind = getattr(fields_of(section).get(key), "annotation", None)
        if kind is str:
            values[key] = text
        elif stripped in {"", "null", "~"}:
            values[key] = None
        elif kind == str | None or (kind == tuple[str, ...] and stripped[0] != "["):
            values[key] = text
        else:
            values[key] = _yaml_value(override, stripped)
    return values


def override(key: str, value: object) -> str:
    """Return the override that sets a key to a value, as it is typed in a shell."""
    text = isinstance(value, str) and parse_overrides([f"{key}={value}"], RunConfig)[key] == value
    return in_shell(f"{key}={value if text else json.dumps(value)}")


def _yaml_value(override: str, text: str) -> Any:
    """Return the value in an override. Text without quotes keeps its `#`."""
    try:
        value = parse_yaml(text, name=override)
    except ConfigError as error:
        if not isinstance(error.__cause__, yaml.YAMLError):
            raise  # valid YAML with its own message, such as a repeated key
        raise ConfigError(
            f"{override!r} is not YAML.",
            fix="Correct the value, and quote the whole override: 'section.key=value'.",
        ) from error
    return text if value is None or (isinstance(value, str) and text[0] not in "'\"") else value


def nested(values: JsonObject) -> JsonObject:
    """Return {"optim.lr": 1} as {"optim": {"lr": 1}}."""
    document: JsonObject = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        inner = document
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"{key} contradicts the earlier {section}={inner}.",
                    fix="Keep one of the two.",
                )
        held = inner.get(last)
        inner[last] = held | value if isinstance(held, dict) and isinstance(value, dict) else value
    return document


def merge(document: JsonObject, layer: JsonObject, prefix: str = "") -> None:
    """Merge `layer` into `document` in place. A key clears its alternatives in the layers below."""
    for key, value in layer.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in MAPPINGS:
            if not isinstance(document.setdefault(key, {}), dict):
                document[key] = {}
            merge(document[key], value, f"{dotted}.")
            continue
        for group in ALTERNATIVES:
            if dotted in group and value is not None:
                for other in {name.rpartition(".")[2] for name in group} - layer.keys():
                    document.pop(other, None)
        document[key] = value


def validate(document: JsonObject, *, file: Path | None = None) -> RunConfig:
    """Return the validated config. An empty section means its defaults.

    Raises: ConfigError naming the key, the nearest known key when it is unknown, and `file`.
    """
    try:
        if document.get("speedups", "auto") in (None, ""):
            raise ConfigError(
                "speedups is empty.",
                fix="Write speedups=none for no speedup, or remove it for auto.",
            )
        return RunConfig.model_validate(
            {key: value for key, value in document.items() if value is not None}
        )
    except (ConfigError, ValidationError) as error:
        answer = error if isinstance(error, ConfigError) else explain(error, RunConfig)
        if file is not None:
            fix = answer.fix
            if isinstance(answer, ForeignKeys):
                fix = f"`flatout convert {in_shell(file)} --out my.yaml` renames its keys."
            answer = ConfigError(f"{file}: {answer.what}", fix=fix)
        raise answer from error


def difference(stored: RunConfig, wanted: RunConfig, *, free: Iterable[str] = ()) -> list[str]:
    """Return the keys in which `wanted` differs from `stored`, as `key: stored -> wanted`.

    Values that `wanted` leaves open (auto, or None that it does not state) do not count as
    different, nor do keys that start with an entry of `free`.
    """
    stated = flat(wanted.model_dump(exclude_unset=True)).items()
    nulls = {key: value for key, value in stated if value is None}
    nulls.pop("train.init_from", None)  # a run that goes on has its weights
    old, new = flat(stored.to_dict()), flat(wanted.to_dict()) | nulls
    changed = (
        key
        for key, value in new.items()
        if (key in nulls or value not in (None, "auto")) and old.get(key) != value
    )
    return [
        f"{key}: {old.get(key)} -> {new[key]}" for key in changed if not key.startswith(tuple(free))
    ]


def flat(document: JsonObject, prefix: str = "") -> JsonObject:
    """Return nested sections as one flat mapping with dotted keys."""
    result: JsonObject = {}
    for key, value in document.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in MAPPINGS:
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result
