"""Gemma, its first version: RMSNorm with a gain around 1, GeGLU and a scaled embedding."""

from __future__ import annotations

import math

from flatout.architectures import Architecture, TensorMap, llama
from flatout.architectures.config_json import (
    first_difference,
    require,
    rotary_document,
    rotary_keys,
    usual_keys,
)
from flatout.architectures.transforms import plus_one
from flatout.json_io import JsonObject
from flatout.models.transformer import TransformerConfig

SHAPE = {key: value for key, value in llama.SHAPE.items() if key != "embedding_scale"} | {
    "activation": "geglu",
    "bias": False,
    "qk_norm": False,
    "window": None,
}
"""The keys under `model.` that every model of the family has, without the embedding's scale."""
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", None)
"""transformers computes the tanh formula for both names."""
HEAD_DIM, KV_HEADS = 256, {"gemma": 16, "gemma2": 4}
"""The head size, and the key and value heads, of a config.json that states none."""


def keys(document: JsonObject) -> JsonObject:
    """Return the `model.` keys for a config.json of the family.

    Raises: ConfigError for an activation, biases or positions that flatout lacks.
    """
    require(document, "hidden_act", ACTIVATIONS)
    require(document, "hidden_activation", ACTIVATIONS)
    require(document, "attention_bias", (False, None))
    require(document, "use_bidirectional_attention", (False, None))
    sizes = usual_keys(document)
    return {
        **sizes,
        "num_kv_heads": document.get("num_key_value_heads", KV_HEADS[document["model_type"]])
        or sizes["num_heads"],
        "head_dim": document.get("head_dim") or HEAD_DIM,
        "norm": "rmsnorm",
        "activation": "geglu",
        "tied_head": document.get("tie_word_embeddings", True),
        "embedding_scale": math.sqrt(sizes["d_model"]),
        "rms_norm_eps": float(document.get("rms_norm_eps") or 1e-6),
    } | rotary_keys(document)


def why_not(config: TransformerConfig) -> str | None:
    """Return why the class does not have this shape, or None."""
    return why_not_scale(config) or first_difference(config, SHAPE)


def why_not_scale(config: TransformerConfig) -> str | None:
    """Return why this is not a transformer with Gemma's embedding and without biases, or None."""
    if not isinstance(config, TransformerConfig):
        return "It is not a transformer."
    if not math.isclose(config.embedding_scale, math.sqrt(config.d_model)):
        return "model.embedding_scale is not the square root of model.d_model."
    if config.has_qkv_bias:
        return "Queries, keys and values have biases."
    return None


def document(config: TransformerConfig) -> JsonObject:
    """Return the config.json of a model with this shape."""
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": config.num_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied_head,
    } | rotary_document(config)


def tensors(config: TransformerConfig) -> list[TensorMap]:
    """Return the tensors of a model: those of Llama, with gains stored as their distance from 1."""
    return [
        plus_one(one.name, one.foreign[0]) if one.name.endswith("norm.weight") else one
        for one in llama.tensors(config)
    ]


ARCHITECTURE = Architecture(
    model_types=("gemma",),
    keys=keys,
    why_not=why_not,
    document=document,
    tensors=tensors,
    prefix="model.",
    ignored=llama.ARCHITECTURE.ignored,
    heads=llama.ARCHITECTURE.heads,
)
