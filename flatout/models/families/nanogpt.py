"""Checkpoints of nanoGPT's train.py: GPT-2's names, with matrices as torch stores them."""

from __future__ import annotations

from flatout.errors import ConfigError
from flatout.models.families import gpt2
from flatout.models.families.table import (
    OTHER_MODEL,
    SAME,
    Architecture,
    Shapes,
    TensorMap,
    require,
    sizes,
)
from flatout.storage.json_io import JsonObject

MODEL_ARGS = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
"""The keys of `model_args` in a checkpoint."""


def recognise(shapes: Shapes, others: JsonObject) -> JsonObject | None:
    """Return the `model.` keys of a checkpoint, or None when it has no `model_args`.

    Raises: ConfigError when one is missing, or the checkpoint is of a changed nanoGPT.
    """
    arguments = others.get("model_args")
    if not isinstance(arguments, dict) or "transformer.wte.weight" not in shapes:
        return None
    if unknown := sorted(key for key in {*arguments} - MODEL_ARGS if arguments[key]):
        raise ConfigError(
            f"The checkpoint is of a changed nanoGPT: its model_args has {unknown[0]}.",
            fix=OTHER_MODEL,
        )
    require(arguments, "bias", True, False)
    return ARCHITECTURE.keys(arguments) | {"bias": arguments.get("bias") is not False}


ARCHITECTURE = Architecture(
    fields=sizes(
        "vocab_size n_layer=num_layers n_embd=d_model n_head=num_heads block_size=max_seq_len"
    ),
    states={  # GELU is exact, as in nanoGPT since 2023
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu_exact",
        "tied_head": True,
    },
    not_exported="flatout only reads checkpoints of nanoGPT. Export it as GPT-2.",
    tensors=lambda config: [
        TensorMap(one.name, one.foreign[:1], *SAME) for one in gpt2.ARCHITECTURE.tensors(config)
    ],
    ignored=gpt2.ARCHITECTURE.ignored,
    recognise=recognise,
)
