"""Models that `flatout export` wrote under flatout's own names and keys."""

from __future__ import annotations

from typing import Any

from flatout.config.registry import MODELS
from flatout.errors import ConfigError
from flatout.models.families.table import SAME, Architecture, Field, TensorMap, names_of
from flatout.storage.json_io import JsonObject

MODEL_TYPE = "flatout"


def read(document: JsonObject, _keys: JsonObject) -> JsonObject:
    """Return the `model.` keys that a config.json states.

    Raises: ConfigError when it states none, or the model is not a part of flatout.
    """
    found: Any = document.get("model")
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind not in MODELS.names():
        raise ConfigError(
            f"config.json of the base model names the model {kind!r}, which is not a part of "
            "flatout.",
            fix="Export the run again. A model defined by your own code is not read.",
        )
    return dict(found)


ARCHITECTURE = Architecture(
    classes={MODEL_TYPE: ""},
    fields=[Field(read)],
    not_exported="Its names are flatout's own.",
    tensors=lambda config: [TensorMap(name, (name,), *SAME) for name in names_of(config)],
    heads=(),
)
