"""Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM: RMSNorm, rotary positions and SwiGLU."""

from __future__ import annotations

from flatout.architectures import Architecture, TensorMap
from flatout.architectures.config_json import (
    first_difference,
    require,
    rotary_document,
    rotary_keys,
    usual_keys,
)
from flatout.architectures.transforms import same, stacked
from flatout.errors import ConfigError
from flatout.json_io import JsonObject
from flatout.models.transformer import TransformerConfig

SHAPE = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "activation": "swiglu",
    "parallel_residual": False,
    "rotary_dims": None,
    "post_norm": False,
    "full_attention_every": None,
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "attention_softcap": None,
}
"""The keys under `model.` that every model of the family has."""
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
QWEN3_HEAD_DIM = 128
"""The head size of a Qwen 3 config.json that states none."""
KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
"""The key and value heads of a config.json that states none; None: as many as query heads."""
WINDOW = 4096
"""The window of a Mistral or windowed Qwen config.json that states none; null means no window."""
FULL_LAYERS = 28
"""The layers without a window of a windowed Qwen config.json that states none."""


def keys(document: JsonObject) -> JsonObject:
    """Return the `model.` keys for a config.json of the family.

    Raises: ConfigError for activations, biases, windows or positions that flatout lacks.
    """
    kind, sizes = document["model_type"], usual_keys(document)
    heads = sizes["num_heads"]
    require(document, "hidden_act", ("silu", None))
    require(document, "no_rope_layers", (None, [], [1] * sizes["num_layers"]))
    default = QWEN3_HEAD_DIM if kind == "qwen3" else sizes["d_model"] // heads
    biases = {bool(document.get("attention_bias")), bool(document.get("mlp_bias"))}
    if len(biases) > 1:
        raise ConfigError(
            "The imported model has biases in its attention or its MLP, but not in both.",
            fix="Start from another model: flatout has biases in all linear layers, or in those of "
            "queries, keys and values.",
        )
    return {
        **sizes,
        "num_kv_heads": document.get("num_key_value_heads", KV_HEADS[kind]) or heads,
        "head_dim": document.get("head_dim") or default,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": biases == {True},
        "qkv_bias": biases == {True} or kind == "qwen2",
        "tied_head": bool(document.get("tie_word_embeddings")),
        "qk_norm": kind == "qwen3",
        "rms_norm_eps": float(document.get("rms_norm_eps") or 1e-6),
        "window": window(document),
    } | rotary_keys(document)


def window(document: JsonObject) -> int | None:
    """Return the attention window of all layers, or None when they have none.

    As in transformers, Mistral has one unless config.json states null, Qwen only with
    `use_sliding_window`, and Llama none whatever config.json states.

    Raises: ConfigError when some layers have one and others do not.
    """
    kind, size = document["model_type"], document.get("sliding_window", WINDOW)
    is_qwen = kind.startswith("qwen")
    if kind == "llama" or size is None or (is_qwen and not document.get("use_sliding_window")):
        return None
    count = int(document["num_hidden_layers"])
    first = int(document.get("max_window_layers", FULL_LAYERS)) if is_qwen else 0
    types = document.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(count)
    ]
    if len({*types}) > 1:
        raise ConfigError(
            "Some layers of the imported model have an attention window and others do not.",
            fix="Start from another model: model.window applies to every layer.",
        )
    return int(size) if "sliding_attention" in types else None


def why_not(config: TransformerConfig) -> str | None:
    """Return why no class of the family has this shape, or None."""
    if not isinstance(config, TransformerConfig):
        return "It is not a transformer."
    if difference := first_difference(config, SHAPE):
        return difference
    if config.bias and (config.qk_norm or config.window):
        return "Biases go with neither model.qk_norm nor model.window."
    if config.qk_norm and config.has_qkv_bias:
        return "Biases of queries and keys do not go with model.qk_norm."
    if config.bias != config.has_qkv_bias and config.bias:
        return "Every linear layer has a bias, except queries, keys and values."
    return None


def document(config: TransformerConfig) -> JsonObject:
    """Return the config.json of the class that has this shape."""
    kind = "mistral" if config.window else "llama"
    if config.has_qkv_bias and not config.bias:
        kind = "qwen2"
    if config.qk_norm:
        kind = "qwen3"
    result: JsonObject = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.num_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied_head,
    }
    if kind == "llama":
        result |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    if kind == "mistral":
        result |= {"sliding_window": config.window}
    if kind.startswith("qwen"):
        result |= {
            "use_sliding_window": config.window is not None,
            "sliding_window": config.window,
            "max_window_layers": 0 if config.window else config.num_layers,
        }
    return result | rotary_document(config)


def tensors(config: TransformerConfig) -> list[TensorMap]:
    """Return the tensors of a model of the family."""
    maps = [
        same("token_embedding.weight", "model.embed_tokens.weight"),
        same("final_norm.weight", "model.norm.weight"),
    ]
    if not config.tied_head:
        maps.append(same("unembedding.weight", "lm_head.weight"))
    for layer in range(config.num_layers):
        maps += _block(config, f"blocks.{layer}", f"model.layers.{layer}")
    return maps


def _block(config: TransformerConfig, ours: str, theirs: str) -> list[TensorMap]:
    heads = [count * config.head_size for count in (config.num_heads, *[config.kv_heads] * 2)]
    attention = [f"{theirs}.self_attn.{part}_proj" for part in "qkv"]
    gated = [f"{theirs}.mlp.{part}_proj" for part in ("gate", "up")]
    maps = [
        same(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight"),
        same(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight"),
    ]
    if config.qk_norm:
        maps += [
            same(f"{ours}.attention.query_norm.weight", f"{theirs}.self_attn.q_norm.weight"),
            same(f"{ours}.attention.key_norm.weight", f"{theirs}.self_attn.k_norm.weight"),
        ]
    for kind in ["weight", *(["bias"] if config.has_qkv_bias else [])]:
        names = [f"{name}.{kind}" for name in attention]
        maps.append(stacked(f"{ours}.attention.qkv.{kind}", names, heads))
    for kind in ["weight", *(["bias"] if config.bias else [])]:
        names = [f"{name}.{kind}" for name in gated]
        maps += [
            same(f"{ours}.attention.output.{kind}", f"{theirs}.self_attn.o_proj.{kind}"),
            stacked(f"{ours}.mlp.gate_up.{kind}", names, [config.mlp_width] * 2),
            same(f"{ours}.mlp.down.{kind}", f"{theirs}.mlp.down_proj.{kind}"),
        ]
    return maps


ARCHITECTURE = Architecture(
    model_types=tuple(CLASSES),
    keys=keys,
    why_not=why_not,
    document=document,
    tensors=tensors,
    prefix="model.",
    ignored=(r".*rotary_emb\.inv_freq",),
    heads=("lm_head.weight",),
)
