"""The shape of a converted model: names, a tool's defaults, and weights to start from."""

from __future__ import annotations

import pytest

from flatout.config.convert import convert
from flatout.config.schema import nested, validate
from flatout.models.transformer import TransformerConfig

LITGPT = {"train": {"global_batch_size": 512, "micro_batch_size": 4, "max_tokens": 10**9}}
GPT2 = {"block_size": 512, "max_iters": 20, "init_from": "gpt2-medium"}
PARAMETERS = {"tiny-llama-1.1b": 1_100_048_384, "pythia-14m": 14_067_712}
"""Weights by the name of a model, as its authors state them."""


def converted(document):
    found = convert(document, [])
    validate(nested(found.values))
    return found


def shape_of(found):
    return nested(found.values).get("model", {})


def item_of(found, key):
    (item,) = [item for item in found.items if item.key == key]
    return item


def weights_in(shape):
    """Return the number of weights of a shape: matrices, biases and norms."""
    config = TransformerConfig.model_validate(shape)
    d, f, v = config.d_model, config.mlp_width, config.vocab_size
    kv = config.kv_heads * config.head_size
    ups = 2 if config.activation == "swiglu" else 1
    block = 2 * d * d + 2 * d * kv + (ups + 1) * d * f
    norms = d * (2 if config.bias else 1)
    biases = (d + 2 * kv + d + ups * f + d) * config.bias
    heads = 1 if config.tied_head else 2
    return heads * v * d + config.num_layers * (block + biases + 2 * norms) + norms


@pytest.mark.parametrize(("name", "number"), PARAMETERS.items())
def test_a_name_that_states_a_shape_is_converted_exactly(name, number):
    found = converted({"model_name": name, "model_config": None, **LITGPT})
    assert item_of(found, "model_name").outcome == "mapped"
    assert weights_in(shape_of(found)) == number
    assert found.values["data.seq_len"] == shape_of(found)["max_seq_len"]


@pytest.mark.parametrize("name", ["Llama-3-8B", "llama-1b", "pythia"])
def test_a_name_without_an_exact_shape_is_not_converted(name):
    found = converted({"model_name": name, **LITGPT})
    item = item_of(found, "model_name")
    assert item.outcome == "missing"
    assert f"The name {name} does not determine a shape" in item.why
    assert shape_of(found) == {"tied_head": False}


def test_torchtitans_flavor_belongs_to_its_model():
    document = {"training": {"seq_len": 8, "local_batch_size": 1}}
    found = converted(document | {"model": {"name": "llama3", "flavor": "8B"}})
    assert shape_of(found)["d_ff"] == 14336
    assert "model.rotary_scaling=llama3" in item_of(found, "model.flavor").why
    other = converted(document | {"model": {"name": "deepseek_v3", "flavor": "8B"}})
    assert item_of(other, "model.flavor").outcome == "missing"
    assert "deepseek_v3_8B" in item_of(other, "model.flavor").why
    assert shape_of(other) == {}


def test_litgpts_config_keeps_biases_and_parallel_residuals():
    sizes = {"n_layer": 6, "n_head": 6, "n_embd": 288, "block_size": 256}
    found = converted({"model_name": "pythia-14m", "model_config": sizes, **LITGPT})
    assert shape_of(found) == {
        "num_layers": 6,
        "num_heads": 6,
        "d_model": 288,
        "max_seq_len": 256,
        "norm": "layernorm",
        "activation": "gelu_exact",
        "bias": True,
        "parallel_residual": True,
        "rotary_dims": 12,
        "tied_head": False,
    }
    assert found.defaults["model_config.bias"] is True
    assert item_of(found, "model_name").why == "The keys of model_config set the shape."
    own = sizes | {"bias": False, "parallel_residual": False, "mlp_class_name": "LLaMAMLP"}
    stated = shape_of(converted({"model_config": own, **LITGPT}))
    assert (stated["bias"], stated["parallel_residual"]) == (False, False)
    assert stated["activation"] == "swiglu"


@pytest.mark.parametrize(
    ("document", "activation"),
    [
        ({"hidden_act": "gelu"}, "gelu_exact"),
        ({"hidden_act": "gelu_new"}, "gelu"),
        ({"mlp_class_name": "GptNeoxMLP"}, "gelu_exact"),
        ({"mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh"}, "gelu"),
        ({"mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh"}, "geglu"),
        ({"mlp_class_name": "LLaMAMLP", "gelu_approximate": "none"}, "swiglu"),
    ],
)
def test_the_formula_of_the_gelu_is_kept(document, activation):
    assert shape_of(converted(document)) == {"activation": activation}


def test_litgpts_checkpoint_is_the_model_to_start_from():
    document = {"checkpoint_dir": "checkpoints/ORG/Small", "lora_query": True, "lora_r": 8}
    found = converted(document | {"train": {"micro_batch_size": 1}, "data": {"class_path": "A"}})
    assert found.values["train.init_from"] == "hf:ORG/Small"
    assert "checkpoint.dir" not in found.values
    assert shape_of(found) == {}
    assert converted({"checkpoint_dir": "out"}).values == {"checkpoint.dir": "out"}


def test_weights_have_a_shape_of_their_own():
    found = converted(GPT2 | {"n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.1})
    assert found.values["train.init_from"] == "hf:openai-community/gpt2-medium"
    assert shape_of(found) == {"dropout": 0.1}
    for key in ("n_layer", "n_head", "n_embd"):
        item = item_of(found, key)
        assert (item.outcome, item.becomes) == ("unnecessary", {})
        assert "weights which train.init_from names" in item.why
    assert shape_of(converted(GPT2)) == {}
    assert not found.defaults.keys() & {"n_layer", "n_head", "n_embd"}
    assert converted(GPT2 | {"init_from": "scratch"}).values["model.num_layers"] == 12
