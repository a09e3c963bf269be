"""The model's shape: its vocabulary, its defaults, and the keys of a base model."""

from __future__ import annotations

import json
from collections.abc import Iterator

from flatout.config.registry import MODELS
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset, members_of
from flatout.distributed.context import Context
from flatout.distributed.pipeline import check_stages
from flatout.distributed.tensor import Split
from flatout.errors import ConfigError
from flatout.models.families.source import find_model, is_foreign
from flatout.models.language_model import model_of
from flatout.ops import Ops

FREE_OF_WEIGHTS = (
    "chunk_size",
    "dropout",
    "initialisation",
    "max_seq_len",
    "memory",
    "rotary_base",
    "window",
)
"""Model keys that may differ from those the weights were trained with, as long as shapes agree.

The new run may use longer sequences, more dropout, or a different initialisation for fresh weights.
With any other key changed, the same weights would compute a different function.
"""
FREE_OF_BASE = (*FREE_OF_WEIGHTS, "z_loss")
"""Keys that may differ from a base model, whose files do not describe training."""


def with_shape(config: RunConfig, dataset: AnyDataset | None) -> RunConfig:
    """Return the configuration with the vocabulary size and the model's defaults filled in.

    Raises: ConfigError, also when processes cannot share rows and layers as `parallel` requires.
    """
    config = with_base_shape(config, dataset)
    vocab_size = config.model.vocab_size or (dataset.vocab_size if dataset else None)
    if vocab_size is None:
        raise ConfigError(
            "The vocabulary size is not known: neither model.vocab_size nor a dataset sets it"
            + (f", and {config.data.path} is not a dataset yet." if config.data.path else "."),
            fix="Set model.vocab_size, such as 50304 for GPT-2's tokenizer, or data.path to a "
            "prepared dataset.",
        )
    if dataset is not None and vocab_size < dataset.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the vocabulary of "
            f"{members_of(dataset)[0].dataset.path}, {dataset.vocab_size}.",
            fix="Remove model.vocab_size, or prepare the data with the model's own tokenizer.",
        )
    _, model_config = model_of(config, vocab_size=vocab_size)
    for error in without_effect(config):
        raise error
    config = config.with_values(
        {f"model.{key}": value for key, value in model_config.model_dump(mode="json").items()}
    )
    _check_divides(config)
    return config


def without_effect(config: RunConfig) -> Iterator[ConfigError]:
    """Yield an error for each key of a valid model that has no effect beside the others."""
    kind = MODELS.get(config.model.kind).Config
    shape = kind.model_validate({"vocab_size": 1} | config.model.own())
    for key, values in kind.used_with.items():
        value, needs = getattr(shape, key), [one.split("=") for one in values.split()]
        is_used = any(str(getattr(shape, name)).lower() == wanted for name, wanted in needs)
        if not is_used and value != kind.model_fields[key].default:
            others = " or ".join(f"model.{one}" for one in values.split())
            yield ConfigError(
                f"model.{key}={value} has no effect without {others}.",
                fix="Remove it, or set the other key.",
            )


def _check_divides(config: RunConfig) -> None:
    """Check that processes can share rows, layers and the model as `parallel` requires.

    Raises: ConfigError, as the model's `share_rows` and `share_layers`, and as `check_stages`.
    """
    parallel, data = config.parallel, config.data
    if parallel.per_row == 1:
        return
    model_class, model_config = model_of(config)
    model = model_class.on_meta(model_config, Ops.plain())
    if parallel.context > 1:
        context = Context(None, 0, parallel.context, bool(model.divides_rows))
        model.share_rows(context, seq_len=data.seq_len)
    if parallel.pipeline > 1:
        check_stages(model, parallel)
    if parallel.tensor > 1:
        model.share_layers(Split(None, 0, parallel.tensor), seq_len=data.seq_len)


def with_base_shape(config: RunConfig, dataset: AnyDataset | None) -> RunConfig:
    """Return the configuration with the model keys of the base model that train.init_from names.

    Keys that the configuration states must agree with them, but a larger embedding than the
    dataset's vocabulary is accepted if model.vocab_size states it. A run or checkpoint of flatout
    changes nothing here.

    Raises: ConfigError naming both values of a key that differs, or both vocabularies;
            CheckpointError when the model's config.json cannot be read.
    """
    init_from = config.train.init_from
    if init_from is None or not is_foreign(init_from):
        return config
    stated = {key: value for key, value in config.model.own().items() if value is not None}
    if config.model.vocab_size is not None:
        stated["vocab_size"] = config.model.vocab_size
    own = dict(find_model(init_from, whole=False, for_run=True).keys)
    if not own:  # the tensors of this run's own model
        return config
    kind, rows = own.pop("kind"), own["vocab_size"]
    if config.model.kind != kind and (stated or config.model.kind != "transformer"):
        raise _different({"kind": (config.model.kind, kind)}, init_from)
    if dataset is not None and rows != dataset.vocab_size:
        known, origin = dataset.vocab_size, members_of(dataset)[0].dataset.path
        sizes = f"The base model {init_from} has a vocabulary of {rows}, and the tokenizer"
        if rows < known:
            raise ConfigError(
                f"{sizes} of {origin} has {known}.",
                fix="Prepare the data with the model's own tokenizer, `--tokenizer ORG/NAME` or "
                "its tokenizer.json.",
            )
        if config.model.vocab_size is None:
            raise ConfigError(
                f"{sizes} of {origin} only {known}: {rows - known} rows of its embedding have "
                "no token.",
                fix="Prepare the data with the model's own tokenizer. If it is that tokenizer, and "
                f"the embedding is only padded, set model.vocab_size={rows}.",
            )
    model_class = MODELS.get(kind)
    theirs = model_class.check(own, seq_len=1).model_dump(mode="json")
    if differing := {
        key: (value, theirs[key])
        for key, value in stated.items()
        if key in theirs and value != theirs[key] and key not in FREE_OF_BASE
    }:
        raise _different(differing, init_from)
    own |= stated
    model_class.check(own, seq_len=config.data.seq_len)  # rejects unknown keys
    values = own | {"kind": kind}
    return config.with_values({f"model.{key}": value for key, value in values.items()})


def _different(keys: dict[str, tuple[object, object]], init_from: str) -> ConfigError:
    listed = "; ".join(
        f"model.{key} is {mine} here and {theirs} there" for key, (mine, theirs) in keys.items()
    )
    words = (f"model.{key}={json.dumps(theirs)}" for key, (_, theirs) in keys.items())
    return ConfigError(
        f"The configuration does not fit the base model {init_from}: {listed}.",
        fix="Remove the model's shape from the recipe: it comes from the base model. Or set "
        f"{' '.join(words)}.".replace('"', ""),
    )
