"""Checkpoints of nanoGPT: its names, its arguments, and exact GELU."""

import pytest
import torch
from foreign_models import TOKENS, draw, empty_model
from torch.nn import functional

from flatout.errors import CheckpointError, ConfigError
from flatout.models.families import nanogpt
from flatout.models.families.source import ForeignWeights, find_model

ARGUMENTS = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 61}
ARGUMENTS |= {"bias": True, "dropout": 0.1}
SIZES = {
    "attn.c_attn": (96, 32),
    "attn.c_proj": (32, 32),
    "mlp.c_fc": (128, 32),
    "mlp.c_proj": (32, 128),
}


def checkpoint(*, bias=True, **changes):
    """Return what nanoGPT's train.py saves, with the prefix of a compiled model."""
    shapes = {"wte.weight": (61, 32), "wpe.weight": (24, 32)}
    norms = ["ln_f", *(f"h.{layer}.ln_{n}" for layer in range(2) for n in (1, 2))]
    for layer in range(2):
        shapes |= {f"h.{layer}.{name}.weight": shape for name, shape in SIZES.items()}
        shapes |= {f"h.{layer}.{name}.bias": (s[0],) for name, s in SIZES.items() if bias}
    shapes |= {f"{name}.weight": (32,) for name in norms}
    shapes |= {f"{name}.bias": (32,) for name in norms if bias}
    weights = {
        f"_orig_mod.transformer.{name}": draw(name, shape, around_one="ln_" in name)
        for name, shape in shapes.items()
    }
    weights["_orig_mod.lm_head.weight"] = weights["_orig_mod.transformer.wte.weight"]
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    arguments = ARGUMENTS | {"bias": bias} | changes
    return {"model": weights, "model_args": arguments, "iter_num": 9, "config": {"wandb": False}}


def reference(weights, tokens):
    """Return the logits of GPT-2's formula with exact GELU and one row of tokens."""
    get = {name.removeprefix("_orig_mod.transformer."): w for name, w in weights.items()}.get

    def norm(x, name):
        return functional.layer_norm(x, (32,), get(f"{name}.weight"), get(f"{name}.bias"))

    def linear(x, name):
        return functional.linear(x, get(f"{name}.weight"), get(f"{name}.bias"))

    x = get("wte.weight")[tokens] + get("wpe.weight")[: len(tokens)]
    for layer in (f"h.{number}" for number in range(2)):
        parts = linear(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.view(len(tokens), 4, 8).transpose(0, 1) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(mixed.transpose(0, 1).flatten(1), f"{layer}.attn.c_proj")
        hidden = functional.gelu(linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc"))
        x = x + linear(hidden, f"{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ get("wte.weight").T


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_computes_the_same_logits(tmp_path, bias):
    torch.save(checkpoint(bias=bias), tmp_path / "ckpt.pt")
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        found = find_model(str(path))
        model = empty_model(found.keys)
        weights = ForeignWeights(found, model)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        weights.require_fit(shapes)
        model.load_state_dict({name: weights.read(name) for name in shapes})
        expected = reference(checkpoint(bias=bias)["model"], torch.tensor(TOKENS[0]))
        torch.testing.assert_close(
            model.logits(torch.tensor(TOKENS))[0], expected, rtol=0, atol=1e-5
        )


def test_arguments_of_another_program_are_rejected():
    document = checkpoint(use_rmsnorm=True)
    shapes = {"transformer.wte.weight": (61, 32)}
    with pytest.raises(ConfigError, match="a changed nanoGPT: its model_args has use_rmsnorm"):
        nanogpt.recognise(shapes, document)
    del document["model_args"]["use_rmsnorm"], document["model_args"]["n_head"]
    with pytest.raises(ConfigError, match="has no n_head"):
        nanogpt.recognise(shapes, document)


def test_a_checkpoint_without_arguments_is_another_family():
    assert nanogpt.recognise({"transformer.wte.weight": (61, 32)}, {}) is None
    assert nanogpt.recognise({"weight": (61, 32)}, {"model_args": ARGUMENTS}) is None


def test_more_layers_than_tensors_are_an_error_before_a_model_is_built(tmp_path):
    torch.save(checkpoint(n_layer=10**9), tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match="states a model of at least 32,0"):
        find_model(str(tmp_path / "ckpt.pt"), for_run=True)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        ({"n_layer": "two"}, "sets n_layer='two', which is not a whole number"),
        ({"bias": 3}, "has bias=3 in its configuration"),
        ({5: 1, "rope": 1}, r"ckpt\.pt has a value of the wrong type"),
        ({"n_embd": None}, "sets n_embd=None"),
    ],
)
def test_wrong_arguments_are_not_blamed_on_a_config_json(tmp_path, arguments, about):
    document = checkpoint()
    document["model_args"] |= arguments
    torch.save(document, tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match=about) as caught:
        find_model(str(tmp_path / "ckpt.pt"))
    assert "config.json" not in str(caught.value)


def test_a_head_of_its_own_is_not_blamed_on_a_config_json(tmp_path):
    document = checkpoint()
    document["model"]["_orig_mod.lm_head.weight"] = torch.zeros(61, 32)
    torch.save(document, tmp_path / "ckpt.pt")
    found = find_model(str(tmp_path / "ckpt.pt"))
    model = empty_model(found.keys)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="with other values than the embedding") as caught:
        ForeignWeights(found, model).require_fit(shapes)
    assert "config.json" not in str(caught.value)
