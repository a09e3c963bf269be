"""Tiny models of other tools, whose weights depend only on the names of their tensors."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from flatout.config.registry import ARCHITECTURES, MODELS
from flatout.models.families.table import Architecture
from flatout.models.language_model import LanguageModel, LanguageModelConfig
from flatout.ops import Ops

LLAMA = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rotary_pct": 0.25,
    "layer_norm_eps": 1e-4,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 48,
}
DOCUMENTS = {
    "gpt2": GPT2,
    "gpt2, exact gelu, untied": GPT2
    | {"activation_function": "gelu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-4},
    "llama 2": LLAMA,
    "llama 3, stretched": LLAMA | {"rope_theta": 500000.0, "rope_scaling": STRETCHED},
    "llama, linear": LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama, biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "smollm": LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 5, "head_dim": 16},
    "qwen2": LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16},
    "pythia": NEOX,
    "gpt_neox, one after the other": NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0},
}
"""The config.json of a tiny model of each family."""
TOKENS = [[7, 3, 11, 60, 8, 3, 25, 42, 42, 9, 1, 33, 58, 20, 14, 5]]


def architecture_of(document: dict) -> Architecture:
    """Return the architecture of a config.json."""
    return next(
        architecture
        for architecture in map(ARCHITECTURES.get, ARCHITECTURES.names())
        if document["model_type"] in architecture.classes
    )


def config_of(keys: dict, seq_len: int = 16) -> LanguageModelConfig:
    """Return the checked configuration of a model's keys."""
    keys = dict(keys)
    return MODELS.get(keys.pop("kind")).check(keys, seq_len=seq_len)


def empty_model(keys: dict) -> LanguageModel:
    """Return flatout's model of these keys, with random weights."""
    return MODELS.get(keys["kind"])(config_of(keys), Ops.plain()).eval()


def draw(name: str, shape: tuple[int, ...], *, around_one: bool) -> torch.Tensor:
    """Return a tensor that depends on its name only."""
    numbers = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return torch.from_numpy(around_one + 0.2 * numbers).float()


def foreign_weights(document: dict) -> dict[str, torch.Tensor]:
    """Return the tensors of a tiny model under the names of its family."""
    architecture = architecture_of(document)
    keys = architecture.keys(document)
    shapes = {name: tensor.shape for name, tensor in empty_model(keys).state_dict().items()}
    weights = {}
    for one in architecture.tensors(config_of(keys)):
        parts = one.split(torch.zeros(shapes[one.name]))
        for name, part in zip(one.foreign, parts, strict=True):
            is_gain = part.dim() == 1 and name.endswith("weight")
            weights[name] = draw(name, tuple(part.shape), around_one=is_gain)
    return weights


def write_model(folder: Path, document: dict, weights: dict | None = None) -> Path:
    """Write a model's config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    save_file(weights or foreign_weights(document), folder / "model.safetensors")
    return folder


def joined(document: dict, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of flatout's model, computed from the family's."""
    architecture = architecture_of(document)
    maps = architecture.tensors(config_of(architecture.keys(document)))
    return {one.name: one.join([weights[name] for name in one.foreign]) for one in maps}


def model_with(document: dict, weights: dict[str, torch.Tensor]) -> LanguageModel:
    """Return flatout's model with the family's weights."""
    model = empty_model(architecture_of(document).keys(document))
    model.load_state_dict(joined(document, weights), strict=False)
    return model
