"""All registered models in several shapes, for the tests that every model must pass."""

import pytest
import torch

from flatout.config.registry import MODELS
from flatout.models.language_model import LanguageModel
from flatout.ops import Ops, attention, cross_entropy, scan

PLAIN = Ops.plain()
FAST = Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused, scan=scan.chunked)
VOCAB = 61
SEQ_LEN = 17

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "tied_head": False}
NEOX = {"parallel_residual": True, "rotary_dims": 2, "activation": "gelu_exact"}
SCALED = {"logit_scale": 0.5, "rotary_scaling": "llama3"}
TRANSFORMERS = {
    "default": {},
    "gpt2": {"positions": "learned", "activation": "gelu", "bias": True, "dropout": 0.1},
    "llama": LLAMA,
    "relu2, qk norm, window": {
        "activation": "relu2",
        "qk_norm": True,
        "window": 5,
        "tied_head": False,
        "bias": True,
    },
    "own head size": {"head_dim": 6, "num_kv_heads": 1, "d_ff": 40, "norm": "rmsnorm"},
    "gpt_neox": {**NEOX, "bias": True, "tied_head": False, "dropout": 0.1},
    "scaled": {
        "norm": "rmsnorm",
        "activation": "geglu",
        "qkv_bias": True,
        **SCALED,
        "rotary_factor": 8.0,
        "rotary_original_len": 16,
    },
    "windows in some layers": {
        "norm": "rmsnorm",
        "activation": "geglu",
        "window": 5,
        "full_attention_every": 2,
        "logit_softcap": 20.0,
    },
}
EIGENSTATES = {
    "default": {},
    "untied": {"tied_head": False, "dropout": 0.1, "num_eigenstates": 12},
    "learned positions": {"positions": "learned", "bias": True},
}
SHAPES = {"transformer": TRANSFORMERS, "eigenstate": EIGENSTATES}
SMALL = {"num_layers": 2, "d_model": 32, "num_heads": 4}


def shapes():
    """Yield every registered model in its shapes, or in its default shape if SHAPES has none.

    The keys of SMALL that a model has make it small.
    """
    for kind in MODELS.names():
        known = MODELS.get(kind).Config.model_fields
        small = {key: value for key, value in SMALL.items() if key in known}
        for name, own in SHAPES.get(kind, {"default": {}}).items():
            yield pytest.param((kind, tuple((small | own).items())), id=f"{kind}: {name}")


every_model = pytest.mark.parametrize("shape", list(shapes()))


def make_model(shape, ops=FAST, *, seed=0, seq_len=SEQ_LEN, **changes) -> LanguageModel:
    kind, own = shape
    model_class = MODELS.get(kind)
    torch.manual_seed(seed)
    values = dict(own) | {
        key: value for key, value in changes.items() if key in model_class.Config.model_fields
    }
    return model_class(model_class.check(values | {"vocab_size": VOCAB}, seq_len=seq_len), ops)


def random_tokens(rows=3, seq_len=SEQ_LEN, seed=1):
    tokens = torch.randint(
        VOCAB, (rows, seq_len + 1), generator=torch.Generator().manual_seed(seed)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
