"""Gemma 2: Gemma with norms after each part, capped scores, and windows in every other layer."""

from __future__ import annotations

from flatout.errors import ConfigError
from flatout.models.families import gemma, llama
from flatout.models.families.table import (
    OTHER_MODEL,
    Architecture,
    Field,
    only,
    required,
    tensors_of,
)
from flatout.models.transformer import TransformerConfig
from flatout.storage.json_io import JsonObject

FULL_EVERY = 2
"""Every second layer sees all tokens."""
SOFTCAPS = {
    "final_logit_softcapping": "logit_softcap",
    "attn_logit_softcapping": "attention_softcap",
}
"""The keys of both limits in config.json and under `model.`."""
DEFAULTS = {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
"""Values of a config.json that states none. Null means no limit."""


def layer_types(count: int) -> list[str]:
    """Return transformers' word for each layer."""
    return (["sliding_attention", "full_attention"] * count)[:count]


def read(document: JsonObject, keys: JsonObject) -> JsonObject:
    """Return the keys of what Gemma lacks.

    Raises: ConfigError for other layers with windows, or a different scale of scores than
    flatout's.
    """
    document = DEFAULTS | document
    scale = document["query_pre_attn_scalar"]
    if scale != keys["head_dim"]:
        raise ConfigError(
            f"The base model divides scores by the root of {scale} "
            f"(query_pre_attn_scalar), and flatout by that of the head size, {keys['head_dim']}.",
            fix=OTHER_MODEL,
        )
    own = layer_types(keys["num_layers"])
    if document.get("layer_types", own) != own:
        raise ConfigError(
            "The layers of the base model with an attention window are not those of Gemma 2.",
            fix=OTHER_MODEL,
        )
    return {
        "window": required(document, "sliding_window"),
        **{ours: document[theirs] for theirs, ours in SOFTCAPS.items()},
    }


def write(config: TransformerConfig) -> JsonObject:
    """Return the entries of what Gemma lacks."""
    return {
        "query_pre_attn_scalar": config.head_size,
        "sliding_window": config.window,
        "layer_types": layer_types(config.num_layers),
        **{theirs: getattr(config, ours) for theirs, ours in SOFTCAPS.items()},
    }


TENSORS = gemma.TENSORS.replace("post_attention_layernorm", "pre_feedforward_layernorm")
TENSORS += """
blocks.{}.attention.post_norm.weight plus_one model.layers.{}.post_attention_layernorm.weight
blocks.{}.mlp.post_norm.weight plus_one model.layers.{}.post_feedforward_layernorm.weight
"""

ARCHITECTURE = Architecture(
    classes={"gemma2": "Gemma2ForCausalLM"},
    fields=(*gemma.FIELDS, only("hidden_activation", *gemma.TANH), Field(read, write)),
    states=gemma.STATES | {"post_norm": True, "full_attention_every": FULL_EVERY},
    tensors=tensors_of(TENSORS, **llama.STACKED),
    prefix="model.",
    ignored=llama.ARCHITECTURE.ignored,
)
