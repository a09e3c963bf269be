"""GPT-2: LayerNorm with biases, learned positions and GELU."""

from __future__ import annotations

from flatout.architectures import Architecture, TensorMap
from flatout.architectures.config_json import first_difference, require, required
from flatout.architectures.transforms import Kind, in_blocks, same, transposed, with_bias
from flatout.json_io import JsonObject
from flatout.models.transformer import TransformerConfig

ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
"""Values of `model.activation` by those of config.json; of two names, the first is written."""
SHAPE = {
    "norm": "layernorm",
    "positions": "learned",
    "parallel_residual": False,
    "qk_norm": False,
    "window": None,
    "post_norm": False,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "attention_softcap": None,
}
"""The keys under `model.` that every model of the family has."""


def keys(document: JsonObject) -> JsonObject:
    """Return the `model.` keys for a config.json of GPT-2.

    Raises: ConfigError for an activation or a scale of scores that flatout lacks.
    """
    require(document, "activation_function", (*ACTIVATIONS, None))
    require(document, "scale_attn_weights", (True, None))
    require(document, "scale_attn_by_inverse_layer_idx", (False, None))
    require(document, "add_cross_attention", (False, None))
    return {
        "kind": "transformer",
        "vocab_size": required(document, "vocab_size"),
        "num_layers": required(document, "n_layer"),
        "d_model": required(document, "n_embd"),
        "num_heads": required(document, "n_head"),
        "d_ff": document.get("n_inner") or 4 * document["n_embd"],
        "max_seq_len": document.get("n_positions") or required(document, "n_ctx"),
        "norm": "layernorm",
        "positions": "learned",
        "activation": ACTIVATIONS[document.get("activation_function") or "gelu_new"],
        "bias": True,
        "tied_head": document.get("tie_word_embeddings", True),
        "layer_norm_eps": float(document.get("layer_norm_epsilon") or 1e-5),
    }


def why_not(config: TransformerConfig) -> str | None:
    """Return why GPT-2's class does not have this shape, or None.

    A model without biases has the shape with biases of 0.
    """
    if not isinstance(config, TransformerConfig):
        return "It is not a transformer."
    if difference := first_difference(config, SHAPE):
        return difference
    return why_not_plain_heads(config) or why_not_activation(config)


def why_not_plain_heads(config: TransformerConfig) -> str | None:
    """Return why heads and biases are not as in GPT-2, or None."""
    if config.kv_heads != config.num_heads:
        return "Query heads share key and value heads."
    if config.head_size * config.num_heads != config.d_model:
        return "The heads together are not as wide as the hidden states."
    if config.bias != config.has_qkv_bias:
        return "Only some linear layers have biases."
    return None


def why_not_activation(config: TransformerConfig) -> str | None:
    """Return why the activation is not one of the family's, or None."""
    known = sorted({*ACTIVATIONS.values()})
    if config.activation in known:
        return None
    return f"model.activation is {config.activation}, and this family has {' or '.join(known)}."


def activation_name(config: TransformerConfig) -> str:
    """Return the name of the activation in config.json."""
    return next(name for name, own in ACTIVATIONS.items() if own == config.activation)


def document(config: TransformerConfig) -> JsonObject:
    """Return the config.json of a model with this shape."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_layer": config.num_layers,
        "n_embd": config.d_model,
        "n_head": config.num_heads,
        "n_inner": config.mlp_width,
        "n_positions": config.num_positions,
        "activation_function": activation_name(config),
        "layer_norm_epsilon": config.layer_norm_eps,
        "tie_word_embeddings": config.tied_head,
    }


def tensors(config: TransformerConfig) -> list[TensorMap]:
    """Return the tensors of a GPT-2 model."""
    maps = [
        same("token_embedding.weight", "transformer.wte.weight"),
        same("position_embedding.weight", "transformer.wpe.weight"),
        *with_bias(same, "final_norm", "transformer.ln_f", bias=config.bias),
    ]
    if not config.tied_head:
        maps.append(same("unembedding.weight", "lm_head.weight"))
    names: dict[str, tuple[Kind, str]] = {
        "attention_norm": (same, "ln_1"),
        "attention.qkv": (transposed, "attn.c_attn"),
        "attention.output": (transposed, "attn.c_proj"),
        "mlp_norm": (same, "ln_2"),
        "mlp.up": (transposed, "mlp.c_fc"),
        "mlp.down": (transposed, "mlp.c_proj"),
    }
    return [*maps, *in_blocks(names, "transformer.h", config.num_layers, bias=config.bias)]


ARCHITECTURE = Architecture(
    model_types=("gpt2",),
    keys=keys,
    why_not=why_not,
    document=document,
    tensors=tensors,
    prefix="transformer.",
    ignored=(r".*attn\.(masked_)?bias",),
    heads=("lm_head.weight",),
)
