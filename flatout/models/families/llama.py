"""Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM: RMSNorm, rotary positions and SwiGLU."""

from __future__ import annotations

from flatout.errors import ConfigError
from flatout.models.families.table import (
    Architecture,
    Field,
    entry,
    only,
    require,
    rotary,
    sizes,
    stacked,
    tensors_of,
)
from flatout.models.transformer import TransformerConfig
from flatout.storage.json_io import JsonObject

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""The key and value heads of a config.json that states none. By default, the query heads."""
WINDOW = 4096
"""The window of a Mistral or windowed Qwen config.json that states none. Null means no window."""
FULL_LAYERS = 28
"""The layers without a window of a windowed Qwen config.json that states none."""
SIZES = (
    *sizes(
        "vocab_size hidden_size=d_model intermediate_size=d_ff num_hidden_layers=num_layers "
        "num_attention_heads=num_heads"
    ),
    entry(
        "num_key_value_heads",
        "num_kv_heads",
        lambda document, keys: (
            ("num_key_value_heads" not in document and KV_HEADS.get(document["model_type"]))
            or keys["num_heads"]
        ),
    ),
    entry(
        "head_dim",
        "head_dim",
        lambda document, keys: (
            128 if document["model_type"] == "qwen3" else keys["d_model"] // keys["num_heads"]
        ),
    ),
)

TENSORS = """
token_embedding.weight model.embed_tokens.weight
final_norm.weight model.norm.weight
unembedding.weight lm_head.weight
blocks.{}.attention_norm.weight model.layers.{}.input_layernorm.weight
blocks.{}.mlp_norm.weight model.layers.{}.post_attention_layernorm.weight
blocks.{}.attention.query_norm.weight model.layers.{}.self_attn.q_norm.weight
blocks.{}.attention.key_norm.weight model.layers.{}.self_attn.k_norm.weight
blocks.{}.attention.qkv.weight qkv model.layers.{}.self_attn.q_proj.weight \
    model.layers.{}.self_attn.k_proj.weight model.layers.{}.self_attn.v_proj.weight
blocks.{}.attention.output.weight model.layers.{}.self_attn.o_proj.weight
blocks.{}.mlp.gate_up.weight gate_up model.layers.{}.mlp.gate_proj.weight \
    model.layers.{}.mlp.up_proj.weight
blocks.{}.mlp.down.weight model.layers.{}.mlp.down_proj.weight
blocks.{}.attention.qkv.bias qkv model.layers.{}.self_attn.q_proj.bias \
    model.layers.{}.self_attn.k_proj.bias model.layers.{}.self_attn.v_proj.bias
blocks.{}.attention.output.bias model.layers.{}.self_attn.o_proj.bias
blocks.{}.mlp.gate_up.bias gate_up model.layers.{}.mlp.gate_proj.bias \
    model.layers.{}.mlp.up_proj.bias
blocks.{}.mlp.down.bias model.layers.{}.mlp.down_proj.bias
"""
STACKED = {
    "qkv": lambda c: stacked(c.num_heads * c.head_size, *[c.kv_heads * c.head_size] * 2),
    "gate_up": lambda c: stacked(c.mlp_width, c.mlp_width),
}


def read_variant(document: JsonObject, keys: JsonObject) -> JsonObject:
    """Return the keys in which the models of the family differ.

    As in transformers, Mistral has a window unless config.json states null, Qwen only with
    `use_sliding_window`, and Llama none whatever config.json states.

    Raises: ConfigError when some layers have a window, biases or positions and others do not.
    """
    kind, count = document["model_type"], keys["num_layers"]
    require(document, "no_rope_layers", [], [1] * len(document.get("no_rope_layers") or ()))
    biases = {bool(document.get("attention_bias")), bool(document.get("mlp_bias"))}
    if len(biases) > 1:
        raise ConfigError(
            "The base model has biases in its attention or its MLP, but not in both.",
            fix="Start from a different model: flatout has biases in all linear layers, or in "
            "those of queries, keys and values.",
        )
    size, is_qwen = document.get("sliding_window", WINDOW), kind.startswith("qwen")
    if kind == "llama" or (is_qwen and not document.get("use_sliding_window")):
        size = None
    first = int(document.get("max_window_layers", FULL_LAYERS)) if is_qwen else 0
    usual = ["sliding_attention"] * (first < count) + ["full_attention"] * (first > 0)
    types = document.get("layer_types") or usual
    if size is not None and len({*types}) > 1:
        raise ConfigError(
            "Some layers of the base model have an attention window and others do not.",
            fix="Start from a different model: model.window applies to every layer.",
        )
    return {
        "bias": biases == {True},
        "qkv_bias": biases == {True} or kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "window": int(size) if size is not None and "sliding_attention" in types else None,
    }


def kind_of(config: TransformerConfig) -> str:
    """Return the `model_type` of the class that has this shape."""
    if config.qk_norm:
        return "qwen3"
    if config.has_qkv_bias and not config.bias:
        return "qwen2"
    return "mistral" if config.window else "llama"


def write_variant(config: TransformerConfig) -> JsonObject:
    """Return the entries in which the classes differ."""
    kind = kind_of(config)
    if kind == "llama":
        return {"attention_bias": config.bias, "mlp_bias": config.bias}
    if kind == "mistral":
        return {"sliding_window": config.window}
    return {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": 0 if config.window else config.num_layers,
    }


ARCHITECTURE = Architecture(
    classes=CLASSES,
    fields=(
        *SIZES,
        only("hidden_act", "silu"),
        *sizes("max_position_embeddings=max_seq_len"),
        entry("rms_norm_eps", "rms_norm_eps", 1e-6),
        entry("tie_word_embeddings", "tied_head", False),
        Field(read_variant, write_variant),
        rotary(),
    ),
    states={"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu"},
    kind_of=kind_of,
    tensors=tensors_of(TENSORS, **STACKED),
    prefix="model.",
    ignored=(r".*rotary_emb\.inv_freq",),
)
