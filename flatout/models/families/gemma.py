"""Gemma, its first version: RMSNorm with a gain around 1, GeGLU and a scaled embedding."""

from __future__ import annotations

import math

from flatout.models.families import llama
from flatout.models.families.table import (
    Architecture,
    Field,
    entry,
    only,
    rotary,
    tensors_of,
)

TANH = ("gelu_pytorch_tanh", "gelu")
"""transformers computes the tanh formula for both names."""
FIELDS = (
    *llama.SIZES,
    only("hidden_act", *TANH),
    *llama.MORE_SIZES,
    entry("tie_word_embeddings", "tied_head", True),
    rotary(),
    only("attention_bias", False, written=False),
    only("use_bidirectional_attention", False, written=False),
    Field(lambda _, keys: {"embedding_scale": math.sqrt(keys["d_model"])}),
)
STATES = {"norm": "rmsnorm", "positions": "rotary", "activation": "geglu"}
TENSORS = llama.TENSORS.replace("norm.weight model", "norm.weight plus_one model")

ARCHITECTURE = Architecture(
    classes={"gemma": "GemmaForCausalLM"},
    fields=(*FIELDS, only("hidden_activation", *TANH, written=False)),
    states=STATES,
    tensors=tensors_of(TENSORS, **llama.STACKED),
    prefix="model.",
    ignored=llama.ARCHITECTURE.ignored,
)
