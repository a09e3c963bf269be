"""Checkpoints of nanoGPT's train.py: GPT-2's names, with matrices as torch stores them."""

from __future__ import annotations

from flatout.architectures import Architecture, Shapes, TensorMap, gpt2
from flatout.architectures.config_json import OTHER_MODEL, require, required
from flatout.architectures.transforms import same
from flatout.errors import ConfigError
from flatout.json_io import JsonObject
from flatout.models.transformer import TransformerConfig

MODEL_ARGS = {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
"""The keys of `model_args` in a checkpoint."""


def recognise(shapes: Shapes, others: JsonObject) -> JsonObject | None:
    """Return the `model.` keys of a checkpoint, or None when it has no `model_args`.

    Raises: ConfigError when the checkpoint is of a changed nanoGPT.
    """
    arguments = others.get("model_args")
    if not isinstance(arguments, dict) or "transformer.wte.weight" not in shapes:
        return None
    if unknown := sorted(key for key in {*arguments} - MODEL_ARGS if arguments[key]):
        raise ConfigError(
            f"The imported checkpoint is of a changed nanoGPT: its model_args has {unknown[0]}.",
            fix=OTHER_MODEL,
        )
    return _keys(arguments)


def _keys(document: JsonObject) -> JsonObject:
    """Return the `model.` keys for `model_args`; GELU is exact, as in nanoGPT since 2023.

    Raises: ConfigError when one is missing.
    """
    require(document, "bias", (True, False, None))
    return {
        "kind": "transformer",
        "vocab_size": required(document, "vocab_size"),
        "num_layers": required(document, "n_layer"),
        "d_model": required(document, "n_embd"),
        "num_heads": required(document, "n_head"),
        "max_seq_len": required(document, "block_size"),
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu_exact",
        "bias": document.get("bias") is not False,
        "tied_head": True,
    }


def tensors(config: TransformerConfig) -> list[TensorMap]:
    """Return the tensors of a checkpoint: GPT-2's names, without transposing and absent biases."""
    return [same(one.name, one.foreign[0]) for one in gpt2.tensors(config)]


ARCHITECTURE = Architecture(
    model_types=(),
    keys=None,
    why_not=lambda _config: "Checkpoints of nanoGPT are only imported; export it as GPT-2.",
    tensors=tensors,
    ignored=gpt2.ARCHITECTURE.ignored,
    heads=gpt2.ARCHITECTURE.heads,
    recognise=recognise,
)
