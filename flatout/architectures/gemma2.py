"""Gemma 2: Gemma with norms after each part, capped scores, and windows in every other layer."""

from __future__ import annotations

from flatout.architectures import Architecture, TensorMap, gemma, llama
from flatout.architectures.config_json import OTHER_MODEL, first_difference, required
from flatout.architectures.transforms import plus_one
from flatout.errors import ConfigError
from flatout.json_io import JsonObject
from flatout.models.transformer import TransformerConfig

FULL_EVERY = 2
"""Every second layer sees all tokens."""
SHAPE = {
    key: value
    for key, value in gemma.SHAPE.items()
    if key not in ("window", "logit_softcap", "attention_softcap")
} | {"post_norm": True, "full_attention_every": FULL_EVERY}
"""The keys under `model.` that every model of the family has, without the embedding's scale."""
SOFTCAPS = {
    "logit_softcap": "final_logit_softcapping",
    "attention_softcap": "attn_logit_softcapping",
}
"""The keys of both limits under `model.` and in config.json."""
DEFAULTS = {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
"""Values of a config.json that states none; null means no limit."""
NORMS = {
    "mlp_norm": "pre_feedforward_layernorm",
    "attention.post_norm": "post_attention_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
"""Norms of a block with other names than in Gemma, or that Gemma lacks."""


def keys(document: JsonObject) -> JsonObject:
    """Return the `model.` keys for a config.json of the family.

    Raises: ConfigError for other layers with windows, or another scale of scores than flatout's.
    """
    common = gemma.keys(document)
    document = DEFAULTS | document
    scale = document["query_pre_attn_scalar"]
    if scale != common["head_dim"]:
        raise ConfigError(
            f"The imported model divides scores by the root of {scale} "
            f"(query_pre_attn_scalar), and flatout by that of the head size, {common['head_dim']}.",
            fix=OTHER_MODEL,
        )
    count = common["num_layers"]
    own = [layer_type(layer) for layer in range(count)]
    if document.get("layer_types", own) != own:
        raise ConfigError(
            "The layers of the imported model with an attention window are not those of Gemma 2.",
            fix=OTHER_MODEL,
        )
    return common | {
        "post_norm": True,
        "window": required(document, "sliding_window"),
        "full_attention_every": FULL_EVERY,
        **{key: document[name] for key, name in SOFTCAPS.items()},
    }


def layer_type(layer: int) -> str:
    """Return transformers' word for a layer, counted from 0."""
    return "sliding_attention" if (layer + 1) % FULL_EVERY else "full_attention"


def why_not(config: TransformerConfig) -> str | None:
    """Return why the class does not have this shape, or None."""
    return gemma.why_not_scale(config) or first_difference(config, SHAPE)


def document(config: TransformerConfig) -> JsonObject:
    """Return the config.json of a model with this shape."""
    layers = range(config.num_layers)
    return gemma.document(config) | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.head_size,
        "sliding_window": config.window,
        "layer_types": [layer_type(layer) for layer in layers],
        **{name: getattr(config, key) for key, name in SOFTCAPS.items()},
    }


def tensors(config: TransformerConfig) -> list[TensorMap]:
    """Return the tensors of a model: those of Gemma, with more norms."""
    maps = [one for one in gemma.tensors(config) if not one.name.endswith("mlp_norm.weight")]
    return maps + [
        plus_one(f"blocks.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight")
        for layer in range(config.num_layers)
        for ours, theirs in NORMS.items()
    ]


ARCHITECTURE = Architecture(
    model_types=("gemma2",),
    keys=keys,
    why_not=why_not,
    document=document,
    tensors=tensors,
    prefix="model.",
    ignored=llama.ARCHITECTURE.ignored,
    heads=llama.ARCHITECTURE.heads,
)
