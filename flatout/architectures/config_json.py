"""Read a config.json of Hugging Face's transformers, and refuse what flatout cannot express."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flatout.errors import ConfigError
from flatout.json_io import JsonObject

OTHER_MODEL = "Start from another model; docs/import-models.md lists those that flatout reads."
PLAIN_ROPE = {"default", None}
LLAMA3 = {
    "rotary_factor": "factor",
    "rotary_low_factor": "low_freq_factor",
    "rotary_high_factor": "high_freq_factor",
    "rotary_original_len": "original_max_position_embeddings",
}
"""The keys of Llama 3's scaling under `model.` and in config.json."""


def required(document: JsonObject, key: str, kind: type = int) -> Any:
    """Return the value of a key.

    Raises: ConfigError when config.json lacks it, or its value has another type.
    """
    value = document.get(key)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise ConfigError(
            f"config.json of the imported model states {key}={value!r}."
            if key in document
            else f"config.json of the imported model has no {key}.",
            fix="Restore config.json from the model's repository.",
        )
    return value


def require(document: JsonObject, key: str, values: Collection[Any]) -> None:
    """Check that a key has one of these values; if None is one of them, it may be absent.

    Raises: ConfigError: flatout's model would compute another function.
    """
    value = document.get(key)
    if value not in values:
        shown = " or ".join(repr(v) for v in values if v is not None) or "absent"
        raise ConfigError(
            f"The imported model has {key}={value!r} in config.json; flatout reads {shown}.",
            fix=OTHER_MODEL,
        )


def usual_keys(document: JsonObject) -> JsonObject:
    """Return the `model.` keys of a transformer whose config.json has the usual names of sizes.

    Raises: ConfigError when one is missing.
    """
    return {
        "kind": "transformer",
        "vocab_size": required(document, "vocab_size"),
        "num_layers": required(document, "num_hidden_layers"),
        "d_model": required(document, "hidden_size"),
        "num_heads": required(document, "num_attention_heads"),
        "d_ff": required(document, "intermediate_size"),
        "max_seq_len": required(document, "max_position_embeddings"),
    }


def rotary_keys(document: JsonObject, *, base: float = 10_000.0) -> JsonObject:
    """Return the `model.` keys of rotary positions; `base` is the family's default.

    transformers 5 writes one mapping, `rope_parameters`; earlier versions `rope_theta` and
    `rope_scaling`.

    Raises: ConfigError for a kind of scaling that flatout does not compute.
    """
    parameters = document.get("rope_parameters") or {}
    scaling = parameters or document.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or document.get("rope_theta")
    keys: JsonObject = {"positions": "rotary", "rotary_base": float(theta or base)}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in PLAIN_ROPE:
        return keys
    if kind == "linear":
        return keys | {"rotary_scaling": kind, "rotary_factor": float(scaling["factor"])}
    if kind == "llama3":
        if not theta:  # 10,000 in transformers 4, 500,000 in transformers 5
            required(document, "rope_theta", float)
        numbers = {key: scaling[name] for key, name in LLAMA3.items()}
        return keys | {"rotary_scaling": kind} | numbers
    raise ConfigError(
        f"The imported model scales rotary positions by {kind!r}; flatout computes linear and "
        "llama3.",
        fix=OTHER_MODEL,
    )


def rotary_document(config: Any) -> JsonObject:
    """Return the entries of config.json for the rotary positions of a `TransformerConfig`."""
    scaling: JsonObject | None = None
    if config.rotary_scaling != "none":
        scaling = {"rope_type": config.rotary_scaling, "factor": config.rotary_factor}
    if config.rotary_scaling == "llama3":
        scaling = {"rope_type": "llama3"} | {
            name: getattr(config, key) for key, name in LLAMA3.items()
        }
    return {"rope_theta": config.rotary_base, "rope_scaling": scaling}


def first_difference(config: Any, wanted: JsonObject) -> str | None:
    """Return why a configuration does not have the values of `wanted`, as a sentence, or None."""
    for key, value in wanted.items():
        stated = getattr(config, key)
        if stated != value:
            return f"model.{key} is {stated}, and this family has {value}."
    return None
