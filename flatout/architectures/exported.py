"""Models that `flatout export` wrote under flatout's own names and keys."""

from __future__ import annotations

from typing import Any

from flatout.architectures import Architecture, TensorMap
from flatout.architectures.transforms import same
from flatout.errors import ConfigError
from flatout.json_io import JsonObject
from flatout.ops import Ops
from flatout.registry import MODELS

OWN_TOKENIZER = "flatout_tokenizer.json"
"""The name of flatout's own tokenizer file in an export, if it has no counterpart."""
MODEL_TYPE = "flatout"


def keys(document: JsonObject) -> JsonObject:
    """Return the `model.` keys that a config.json states.

    Raises: ConfigError when it states none, or the model is not a part of flatout.
    """
    found = document.get("model")
    kind = found.get("kind") if isinstance(found, dict) else None
    if not isinstance(found, dict) or kind not in MODELS.names():
        raise ConfigError(
            f"config.json of the imported model names the model {kind!r}, which is not a part of "
            "flatout.",
            fix="Export the run again; a model of your own code is not imported.",
        )
    return dict(found)


def tensors(config: Any) -> list[TensorMap]:
    """Return the tensors of a model, which have the same names and values on both sides."""
    classes = (MODELS.get(name) for name in MODELS.names())
    model_class = next(found for found in classes if found.Config is type(config))
    return [same(name, name) for name in model_class.on_meta(config, Ops.plain()).state_dict()]


ARCHITECTURE = Architecture(
    model_types=(MODEL_TYPE,),
    keys=keys,
    why_not=lambda _config: "Its names are flatout's own.",
    tensors=tensors,
)
