"""GPT-NeoX and Pythia: LayerNorm with biases, partly rotary positions and parallel residuals."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flatout.architectures import Architecture, TensorMap
from flatout.architectures.config_json import (
    first_difference,
    require,
    rotary_document,
    rotary_keys,
    usual_keys,
)
from flatout.architectures.gpt2 import (
    ACTIVATIONS,
    activation_name,
    why_not_activation,
    why_not_plain_heads,
)
from flatout.architectures.transforms import Kind, in_blocks, reordered, same, with_bias
from flatout.json_io import JsonObject
from flatout.models.transformer import TransformerConfig

SHAPE = {
    "norm": "layernorm",
    "positions": "rotary",
    "qk_norm": False,
    "window": None,
    "post_norm": False,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "attention_softcap": None,
}
"""The keys under `model.` that every model of the family has."""
DEFAULT_SHARE = 0.25
"""The rotated share of a head in a config.json that states none."""


def keys(document: JsonObject) -> JsonObject:
    """Return the `model.` keys for a config.json of the family.

    Raises: ConfigError for an activation, biases or positions that flatout lacks.
    """
    require(document, "hidden_act", (*ACTIVATIONS, None))
    require(document, "attention_bias", (True, None))
    sizes = usual_keys(document)
    parameters = document.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor", document.get("rotary_pct", DEFAULT_SHARE))
    base = float(document.get("rotary_emb_base") or 10_000)
    return {
        **sizes,
        "norm": "layernorm",
        "parallel_residual": document.get("use_parallel_residual", True),
        "activation": ACTIVATIONS[document.get("hidden_act") or "gelu"],
        "bias": True,
        "tied_head": bool(document.get("tie_word_embeddings")),
        "rotary_dims": int(sizes["d_model"] // sizes["num_heads"] * share),
        "layer_norm_eps": float(document.get("layer_norm_eps") or 1e-5),
    } | rotary_keys(document, base=base)


def why_not(config: TransformerConfig) -> str | None:
    """Return why the class does not have this shape, or None.

    A model without biases has the shape with biases of 0.
    """
    if not isinstance(config, TransformerConfig):
        return "It is not a transformer."
    if difference := first_difference(config, SHAPE):
        return difference
    rotated = config.rotary_dims or config.head_size
    if int(config.head_size * (rotated / config.head_size)) != rotated:
        return f"config.json cannot state that {rotated} components of a head are rotated."
    return why_not_plain_heads(config) or why_not_activation(config)


def document(config: TransformerConfig) -> JsonObject:
    """Return the config.json of a model with this shape."""
    rotary = rotary_document(config)
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.num_positions,
        "hidden_act": activation_name(config),
        "layer_norm_eps": config.layer_norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": True,
        "rotary_pct": (config.rotary_dims or config.head_size) / config.head_size,
        "rotary_emb_base": rotary["rope_theta"],
        "rope_scaling": rotary["rope_scaling"],
        "tie_word_embeddings": config.tied_head,
    }


def tensors(config: TransformerConfig) -> list[TensorMap]:
    """Return the tensors of a model of the family."""
    maps = [
        same("token_embedding.weight", "gpt_neox.embed_in.weight"),
        *with_bias(same, "final_norm", "gpt_neox.final_layer_norm", bias=config.bias),
    ]
    if not config.tied_head:
        maps.append(same("unembedding.weight", "embed_out.weight"))
    rows = qkv_order(config.num_heads, config.head_size, config.rotary_dims or config.head_size)
    names: dict[str, tuple[Kind, str]] = {
        "attention_norm": (same, "input_layernorm"),
        "attention.qkv": (partial(reordered, order=rows), "attention.query_key_value"),
        "attention.output": (same, "attention.dense"),
        "mlp_norm": (same, "post_attention_layernorm"),
        "mlp.up": (same, "mlp.dense_h_to_4h"),
        "mlp.down": (same, "mlp.dense_4h_to_h"),
    }
    return [*maps, *in_blocks(names, "gpt_neox.layers", config.num_layers, bias=config.bias)]


def qkv_order(num_heads: int, head_dim: int, rotated: int) -> Tensor:
    """Return the row of GPT-NeoX's product for each row of flatout's.

    GPT-NeoX stores query, key and value of a head together, with the rotated components first;
    flatout stores all queries, all keys, all values, with half of the rotated components at the
    start of each half of a head. The same order for queries and keys does not change scores.
    """
    half, rest = rotated // 2, (head_dim - rotated) // 2
    component = torch.arange(head_dim)
    first, second, third, fourth = torch.split(component, [half, half, rest, rest])
    turned = torch.cat((first, third, second, fourth))
    per_part = torch.stack((turned, turned, component))
    head = torch.arange(num_heads)[None, :, None] * 3 * head_dim
    part = torch.arange(3)[:, None, None] * head_dim
    return (head + part + per_part[:, None]).flatten()


ARCHITECTURE = Architecture(
    model_types=("gpt_neox",),
    keys=keys,
    why_not=why_not,
    document=document,
    tensors=tensors,
    prefix="gpt_neox.",
    ignored=(r".*attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    heads=("embed_out.weight", "lm_head.weight"),
)
