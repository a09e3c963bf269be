"""GPT-2: LayerNorm with biases, learned positions and GELU."""

from __future__ import annotations

from flatout.models.families.table import (
    Architecture,
    Field,
    entry,
    only,
    required,
    resolved,
    sizes,
    tensors_of,
)

ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
"""Values of `model.activation` by those of config.json."""

ARCHITECTURE = Architecture(
    classes={"gpt2": "GPT2LMHeadModel"},
    fields=[
        *sizes("vocab_size n_layer=num_layers n_embd=d_model n_head=num_heads"),
        entry("n_inner", "d_ff", lambda _, keys: 4 * keys["d_model"]),
        entry("n_positions", "max_seq_len", lambda document, _: required(document, "n_ctx")),
        # a name of the same, which llama.cpp reads
        Field(lambda *_: {}, lambda config: {"n_ctx": resolved(config, "max_seq_len")}),
        entry("activation_function", "activation", "gelu_new", ACTIVATIONS),
        entry("layer_norm_epsilon", "layer_norm_eps", 1e-5),
        entry("tie_word_embeddings", "tied_head", True),
        only("scale_attn_weights", True, written=False, bias=True),
        only("scale_attn_by_inverse_layer_idx", False, written=False),
        only("add_cross_attention", False, written=False),
    ],
    states={"norm": "layernorm", "positions": "learned"},
    pads_biases=True,
    tensors=tensors_of(
        """
token_embedding.weight transformer.wte.weight
position_embedding.weight transformer.wpe.weight
final_norm.* transformer.ln_f.*
unembedding.weight lm_head.weight
blocks.{}.attention_norm.* transformer.h.{}.ln_1.*
blocks.{}.attention.qkv.* transposed transformer.h.{}.attn.c_attn.*
blocks.{}.attention.output.* transposed transformer.h.{}.attn.c_proj.*
blocks.{}.mlp_norm.* transformer.h.{}.ln_2.*
blocks.{}.mlp.up.* transposed transformer.h.{}.mlp.c_fc.*
blocks.{}.mlp.down.* transposed transformer.h.{}.mlp.c_proj.*
"""
    ),
    prefix="transformer.",
    ignored=(r".*attn\.(masked_)?bias",),
)
