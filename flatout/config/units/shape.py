"""Units of the model's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flatout.config.units.base import THEIRS, UNITS, Unneeded, is_off, late, times, unit
from flatout.json_io import JsonObject
from flatout.registry import MODELS, RECIPES
from flatout.words import name_for, shape_for, value_for

CHOICES = {
    "model.norm": ("layernorm", "rmsnorm"),
    "model.activation": ("gelu", "gelu_exact", "swiglu", "geglu", "relu2"),
    "model.positions": ("learned", "rotary"),
}
UNKNOWN_SHAPE = (
    "The name {} does not state a shape: set the keys of model, or start from a recipe that "
    "`flatout list recipes` shows."
)
UNITS |= {
    "rmsnorm": lambda value, key, known: {key: "layernorm" if is_off(value) else "rmsnorm"},
    "positions": lambda value, key, known: {key: value, "~data.seq_len": value},
}


@late
def hten(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the scales of the hierarchical form, or the single one without it."""
    return {key: [1]} if is_off(value) else {f"~{key}": [1, 2, 4, 8]}


@unit
def shape(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the shape that a model's name stands for, unless keys state it."""
    if any(name.startswith(f"{THEIRS}model_config.") for name in known):
        return Unneeded("The keys of model_config state the shape.")
    if f"{THEIRS}model.flavor" in known:
        return Unneeded("model.flavor states the shape with it.")
    stated = shape_for(str(value))
    if stated is None:
        return UNKNOWN_SHAPE.format(value)
    keys = {name: one for name, one in stated.items() if name not in ("recipe", "note")}
    if "recipe" in stated:
        keys = RECIPES.get(stated["recipe"])["model"] | keys
    found: JsonObject = {f"~model.{name}": one for name, one in keys.items()}
    if "max_seq_len" in keys:
        found["~data.seq_len"] = keys["max_seq_len"]
    return found | {"": stated.get("note", "")}


@unit
def flavor(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the shape that torchtitan's names of a model and its size stand for."""
    name = f"{known.get(f'{THEIRS}model.name')}_{value}"
    return shape(name, key, {}) if shape_for(name) else UNKNOWN_SHAPE.format(name)


@unit
def activation(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the activation; elsewhere, `gelu` is the exact one."""
    return named("gelu_exact" if str(value).lower() == "gelu" else value, key, known)


@late
def mlp(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the activation of litgpt's MLPs; `gelu` chooses the formula of the GELU."""
    name = str(value).lower()
    if name == "gptneoxmlp":
        return {key: known.get(key, "gelu_exact")}
    meant = {"llamamlp": "swiglu", "gemmamlp": "geglu"}.get(name)
    return {key: meant} if meant else f"There is no MLP {value}; {key} chooses its activation."


@unit
def gelu(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the formula of the GELU."""
    return {f"~{key}": "gelu" if value == "tanh" else "gelu_exact"}


@late
def of_width(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a multiple of the model's width."""
    width = known.get("model.d_model")
    return (
        {key: round(times(value, width))} if width else "It multiplies a width that is not stated."
    )


@late
def of_head(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return a share of a head as a number of components, an even one; 1 is the whole head."""
    width, heads = known.get("model.d_model"), known.get("model.num_heads")
    size = known.get("model.head_dim") or (width // heads if width and heads else None)
    if value == 1:
        return {}
    if not size:
        return "It is a share of a head whose size is not stated."
    return {key: round(times(value, size) / 2) * 2}


@unit
def kind(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the model that an architecture is."""
    first = value[0] if isinstance(value, list) and value else value
    name = re.sub(r"(for_?causal_?lm|lm_?head_?model|model)$", "", str(first).lower())
    if "eigenstate" in name:
        return {key: "eigenstate"}
    found = name if name in MODELS.names() else name_for("model", name, MODELS.names())
    return {key: found} if found else f"There is no model {first}: {', '.join(MODELS.names())}."


@unit
def named(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the name of a choice."""
    meant = value_for(key, value) or str(value).lower()
    choices = CHOICES[key]
    return {key: meant} if meant in choices else f"{key} is {' or '.join(choices)}."


@unit
def scales(value: Any, key: str, known: Mapping[str, Any]) -> JsonObject | str:
    """Return the scales, which a list or text states; a switch may turn them off."""
    parts = re.findall(r"\d+", value) if isinstance(value, str) else value
    return {"~model.scales": [int(part) for part in parts]}
