"""The model keys of a run that starts with the weights of another program's model."""

from __future__ import annotations

from flatout.architectures.source import find_model, is_foreign
from flatout.config.schema import RunConfig
from flatout.data.store.mix import AnyDataset, members_of
from flatout.errors import ConfigError
from flatout.json_io import JsonObject
from flatout.registry import MODELS

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

The new run may use longer sequences, more dropout, or another initialisation for fresh weights.
With any other key changed, the same weights would compute a different function.
"""
FREE_OF_IMPORTED = (*FREE_OF_WEIGHTS, "z_loss")
"""Keys that may differ from an imported model, whose files say nothing about training."""


def with_imported_shape(config: RunConfig, dataset: AnyDataset | None) -> RunConfig:
    """Return the configuration with the model keys of the model that train.init_from imports.

    Keys that the configuration states must agree with them. A run or checkpoint of flatout
    changes nothing here.

    Raises: ConfigError naming both values of a key that differs, or both vocabularies;
            CheckpointError when the model's config.json cannot be read.
    """
    init_from = config.train.init_from
    if init_from is None or not is_foreign(init_from):
        return config
    keys = find_model(init_from, whole=False).keys
    stated = {key: value for key, value in config.model.own().items() if value is not None}
    if config.model.vocab_size is not None:
        stated["vocab_size"] = config.model.vocab_size
    kind = config.model.kind if stated else keys["kind"]
    if config.model.kind not in (kind, "transformer") or kind != keys["kind"]:
        raise _different({"kind": (config.model.kind, keys["kind"])}, init_from)
    _require_vocabulary(config.model.vocab_size, keys["vocab_size"], dataset, init_from)
    own = {key: value for key, value in keys.items() if key != "kind"}
    model_class = MODELS.get(kind)
    theirs = model_class.check(own, seq_len=1).model_dump(mode="json")
    differing = {
        key: (value, theirs[key])
        for key, value in stated.items()
        if key in theirs and value != theirs[key] and key not in FREE_OF_IMPORTED
    }
    if differing:
        raise _different(differing, init_from)
    model_class.check(own | stated, seq_len=config.data.seq_len)  # refuses unknown keys
    values: JsonObject = {"kind": kind} | own | stated
    return config.with_values({f"model.{key}": value for key, value in values.items()})


def _different(keys: dict[str, tuple[object, object]], init_from: str) -> ConfigError:
    listed = "; ".join(
        f"model.{key} is {mine} here and {theirs} there" for key, (mine, theirs) in keys.items()
    )
    return ConfigError(
        f"The configuration does not fit the imported model {init_from}: {listed}.",
        fix="Leave the model's shape out of the recipe: it comes from the imported model. Or set "
        + " ".join(f"model.{key}={_word(theirs)}" for key, (_, theirs) in keys.items())
        + ".",
    )


def _word(value: object) -> str:
    """Return a value as it is written on the command line."""
    return (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else f"{value}"
    )


def _require_vocabulary(
    stated: int | None, imported: int, dataset: AnyDataset | None, init_from: str
) -> None:
    """Check that every token of the dataset has a row in the imported embedding, and vice versa.

    A larger embedding is accepted if the configuration states its size.
    """
    if dataset is None:
        return
    known, origin = dataset.vocab_size, members_of(dataset)[0].dataset.origin
    if imported < known:
        raise ConfigError(
            f"The imported model {init_from} has a vocabulary of {imported}, and the tokenizer of "
            f"{origin} has {known}.",
            fix="Prepare the data with the model's own tokenizer, `--tokenizer ORG/NAME` or its "
            "tokenizer.json.",
        )
    if imported > known and stated is None:
        raise ConfigError(
            f"The imported model {init_from} has a vocabulary of {imported}, and the tokenizer of "
            f"{origin} only {known}: {imported - known} rows of its embedding have no token.",
            fix="Prepare the data with the model's own tokenizer. If it is that tokenizer, and the "
            f"embedding is only padded, say so: model.vocab_size={imported}.",
        )
