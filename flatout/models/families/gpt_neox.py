"""GPT-NeoX and Pythia: LayerNorm with biases, partly rotary positions and parallel residuals."""

from __future__ import annotations

from typing import Any

import torch

from flatout.models.families import gpt2
from flatout.models.families.table import (
    NUMBER,
    Architecture,
    Field,
    entry,
    only,
    required,
    resolved,
    rotary,
    rotary_entries,
    sizes,
    tensors_of,
)
from flatout.models.transformer import TransformerConfig
from flatout.storage.json_io import JsonObject

DEFAULT_SHARE = 0.25
"""The rotated share of a head in a config.json that states none."""


def read_rotated(document: JsonObject, keys: JsonObject) -> JsonObject:
    """Return the rotated components of a head, of which config.json states the share."""
    stated = {"rotary_pct": DEFAULT_SHARE} | document | rotary_entries(document)[1]
    name = "partial_rotary_factor" if "partial_rotary_factor" in stated else "rotary_pct"
    share = required(stated, name, NUMBER)
    return {"rotary_dims": int(keys["d_model"] // keys["num_heads"] * share)}


def interleaved(config: TransformerConfig) -> tuple[Any, Any]:
    """Return the transform of the weight of queries, keys and values, whose order differs.

    GPT-NeoX stores query, key and value of a head together, with the rotated components first.
    flatout stores all queries, all keys, all values, with half of the rotated components at the
    start of each half of a head. The same order for queries and keys does not change scores.
    """
    size, rotated = config.head_size, config.rotary_dims or config.head_size
    component = torch.arange(size)
    first, second = component[:rotated].chunk(2)
    third, fourth = component[rotated:].reshape(2, -1)
    turned = torch.cat((first, third, second, fourth))
    per_part = torch.stack((turned, turned, component))
    head = torch.arange(config.num_heads)[None, :, None] * 3 * size
    part = torch.arange(3)[:, None, None] * size
    order = (head + part + per_part[:, None]).flatten()
    return (
        lambda parts: parts[0].index_select(0, order.to(parts[0].device)),
        lambda whole: [whole.index_select(0, order.argsort().to(whole.device))],
    )


ARCHITECTURE = Architecture(
    classes={"gpt_neox": "GPTNeoXForCausalLM"},
    fields=(
        *sizes(
            "vocab_size num_hidden_layers=num_layers hidden_size=d_model "
            "num_attention_heads=num_heads intermediate_size=d_ff "
            "max_position_embeddings=max_seq_len"
        ),
        entry("hidden_act", "activation", "gelu", gpt2.ACTIVATIONS),
        entry("layer_norm_eps", "layer_norm_eps", 1e-5),
        entry("use_parallel_residual", "parallel_residual", True),
        only("attention_bias", True, bias=True),
        Field(
            read_rotated,
            lambda c: {"rotary_pct": resolved(c, "rotary_dims") / c.head_size},
        ),
        rotary("rotary_emb_base"),
        entry("tie_word_embeddings", "tied_head", False),
    ),
    states={"norm": "layernorm", "positions": "rotary"},
    pads_biases=True,
    tensors=tensors_of(
        """
token_embedding.weight gpt_neox.embed_in.weight
final_norm.* gpt_neox.final_layer_norm.*
unembedding.weight embed_out.weight
blocks.{}.attention_norm.* gpt_neox.layers.{}.input_layernorm.*
blocks.{}.attention.qkv.* interleaved gpt_neox.layers.{}.attention.query_key_value.*
blocks.{}.attention.output.* gpt_neox.layers.{}.attention.dense.*
blocks.{}.mlp_norm.* gpt_neox.layers.{}.post_attention_layernorm.*
blocks.{}.mlp.up.* gpt_neox.layers.{}.mlp.dense_h_to_4h.*
blocks.{}.mlp.down.* gpt_neox.layers.{}.mlp.dense_4h_to_h.*
""",
        interleaved=interleaved,
    ),
    prefix="gpt_neox.",
    ignored=(r".*attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
    heads=("embed_out.weight", "lm_head.weight"),
)
