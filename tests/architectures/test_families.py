"""Every family computes what transformers computes, and every table has an inverse.

expected.json contains logits and gradients that transformers computed;
`python tests/architectures/write_expected.py` writes it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from foreign_models import (
    DOCUMENTS,
    GPT2,
    LLAMA,
    TOKENS,
    architecture_of,
    config_of,
    empty_model,
    foreign_weights,
    joined,
    model_with,
    write_model,
)

from flatout.architectures import gemma, gemma2, gpt2, gpt_neox, llama, nanogpt, temporal_eigenstate
from flatout.errors import ConfigError
from flatout.registry import ARCHITECTURES

EXPECTED = Path(__file__).with_name("expected.json")
every_document = pytest.mark.parametrize("name", DOCUMENTS)


def loss_and_gradients(model):
    """Return the logits at the last three positions, and the gradients of the mean loss."""
    tokens = torch.tensor(TOKENS)
    loss_sum, count = model(tokens[:, :-1], tokens[:, 1:])
    (loss_sum / count).backward()
    return model.logits(tokens)[0, -3:].detach(), {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


@every_document
def test_logits_and_gradients_are_those_of_transformers(name):
    expected = json.loads(EXPECTED.read_text())[name]
    logits, gradients = loss_and_gradients(
        model_with(DOCUMENTS[name], foreign_weights(DOCUMENTS[name]))
    )
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=0, atol=1e-4)
    norms = {key: float(gradient.norm()) for key, gradient in gradients.items()}
    assert norms == pytest.approx(expected["gradient_norms"], rel=1e-3, abs=1e-6)


@pytest.mark.slow
@every_document
# from transformers' own code
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_gradient_is_that_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    document, weights = DOCUMENTS[name], foreign_weights(DOCUMENTS[name])
    theirs = in_transformers(transformers, document, weights)
    logits = theirs(torch.tensor(TOKENS)).logits
    ours = model_with(document, weights)
    torch.testing.assert_close(ours.logits(torch.tensor(TOKENS)), logits, rtol=0, atol=1e-4)
    for name_, (actual, expected) in gradients_of_both(document, ours, theirs).items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * scale, msg=name_)


def in_transformers(transformers, document, weights):
    """Return transformers' model of a directory with this config.json and these weights."""
    with tempfile.TemporaryDirectory() as folder:
        return transformers.AutoModelForCausalLM.from_pretrained(
            write_model(Path(folder), document, weights),
            attn_implementation="eager",
            dtype=torch.float32,
        ).eval()


def gradients_of_both(document, ours, theirs):
    """Return the gradients by flatout's names; every map is linear, up to a constant."""
    loss_and_gradients(ours)
    tokens = torch.tensor(TOKENS)
    logits = theirs(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    parameters = dict(theirs.named_parameters())
    parameters["embed_out.weight"] = theirs.lm_head.weight  # its name in files of GPT-NeoX
    gradients = {name: parameters[name].grad for name in foreign_weights(document)}
    linear = joined(document, gradients)
    constant = joined(
        document, {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    )
    return {
        name: (parameter.grad, linear[name] - constant[name])
        for name, parameter in ours.named_parameters()
    }


@every_document
def test_the_inverse_returns_the_same_tensors(name):
    weights = foreign_weights(DOCUMENTS[name])
    architecture = architecture_of(DOCUMENTS[name])
    maps = architecture.tensors(config_of(architecture.keys(DOCUMENTS[name])))
    back = {}
    for one in maps:
        whole = one.join([weights[foreign] for foreign in one.foreign])
        back |= dict(zip(one.foreign, one.split(whole), strict=True))
    assert back.keys() == weights.keys()
    tolerance = 1e-6 if name.startswith("gemma") else 0
    for key, tensor in weights.items():
        torch.testing.assert_close(back[key], tensor, rtol=0, atol=tolerance)


@every_document
def test_the_document_of_the_keys_has_the_same_keys(name):
    architecture = architecture_of(DOCUMENTS[name])
    config = config_of(architecture.keys(DOCUMENTS[name]))
    assert architecture.why_not(config) is None
    document = architecture.document(config)
    assert document["model_type"] == DOCUMENTS[name]["model_type"]
    assert config_of(architecture.keys(json.loads(json.dumps(document)))) == config


@every_document
def test_the_table_contains_every_tensor_once(name):
    keys = architecture_of(DOCUMENTS[name]).keys(DOCUMENTS[name])
    names = [one.name for one in architecture_of(DOCUMENTS[name]).tensors(config_of(keys))]
    assert sorted(names) == sorted(dict(empty_model(keys).named_parameters()))


def test_a_model_without_biases_is_written_with_biases_of_zero():
    config = config_of(
        {"kind": "transformer", "vocab_size": 61, "num_layers": 1, "d_model": 32, "num_heads": 4}
    )
    assert gpt_neox.ARCHITECTURE.why_not(config) is None
    output = next(
        one
        for one in gpt_neox.ARCHITECTURE.tensors(config)
        if one.name == "blocks.0.attention.output.weight"
    )
    weight, bias = output.split(torch.ones(32, 16))
    assert torch.equal(weight, torch.ones(32, 16))
    assert torch.equal(bias, torch.zeros(32))
    assert torch.equal(output.join([weight, bias]), weight)


SHAPES = {
    "llama": (llama, {"activation": "relu2"}, "model.activation is relu2"),
    "llama, a scale": (llama, {"embedding_scale": 2.0}, "model.embedding_scale is 2.0"),
    "llama, biases and norms": (llama, {"bias": True, "qk_norm": True}, "model.bias is True"),
    "llama, key biases and norms": (
        llama,
        {"qkv_bias": True, "qk_norm": True},
        "model.qkv_bias is True, and Qwen3",
    ),
    "llama, no key biases": (llama, {"bias": True, "qkv_bias": False}, "model.qkv_bias is False"),
    "gpt2": (gpt2, {"positions": "rotary"}, "model.positions is rotary"),
    "gpt2, activation": (gpt2, {"activation": "relu2"}, "model.activation is relu2"),
    "gpt2, shared heads": (
        gpt2,
        {"num_kv_heads": 2},
        "model.num_kv_heads is 2, and GPT2LMHeadModel would have 4",
    ),
    "gpt2, own heads": (gpt2, {"head_dim": 4}, "model.head_dim is 4"),
    "gpt2, some biases": (gpt2, {"bias": False, "qkv_bias": True}, "model.bias is False"),
    "gpt_neox": (gpt_neox, {"norm": "rmsnorm"}, "model.norm is rmsnorm"),
    "gemma": (gemma, {"embedding_scale": 1.0}, "model.embedding_scale is 1.0"),
    "gemma, biases": (gemma, {"qkv_bias": True}, "model.qkv_bias is True"),
    "gemma, post norms": (gemma, {"post_norm": True}, "model.post_norm is True"),
    "gemma 2": (gemma2, {"post_norm": False}, "model.post_norm is False"),
}
DEFAULTS = {"llama": "llama 2", "gpt_neox": "pythia"}


@pytest.mark.parametrize("case", SHAPES)
def test_a_shape_that_no_class_has_is_named(case):
    family, changes, reason = SHAPES[case]
    name = case.split(",")[0]
    document = DOCUMENTS[DEFAULTS.get(name, name)]
    config = config_of(family.ARCHITECTURE.keys(document) | changes)
    assert reason in family.ARCHITECTURE.why_not(config)
    eigenstate = config_of({"kind": "eigenstate", "vocab_size": 9})
    assert family.ARCHITECTURE.why_not(eigenstate) == "It is not a transformer."


@pytest.mark.parametrize("family", [nanogpt, temporal_eigenstate])
def test_checkpoints_of_training_programs_are_only_imported(family):
    assert "only imported" in family.ARCHITECTURE.why_not(None)


UNREADABLE = {
    "another activation": ({"hidden_act": "relu"}, "hidden_act='relu'"),
    "biases in attention only": ({"attention_bias": True}, "not in both"),
    "another scaling": ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "by 'yarn'"),
    "layers without positions": ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]"),
    "no width": ({"hidden_size": None}, "hidden_size=None"),
    "a width that is text": ({"hidden_size": "32"}, "hidden_size='32'"),
    "windows in some layers": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}
        | {"max_window_layers": 1},
        "Some layers",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_flatout_cannot_compute_is_refused(case):
    changes, reason = UNREADABLE[case]
    with pytest.raises(ConfigError, match=reason):
        llama.ARCHITECTURE.keys(LLAMA | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"query_pre_attn_scalar": 24}, "the root of 24"),
        ({"layer_types": ["full_attention"] * 2}, "are not those of Gemma 2"),
    ],
)
def test_what_differs_from_gemma_2_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        gemma2.ARCHITECTURE.keys(DOCUMENTS["gemma 2"] | changes)


def test_an_absent_key_is_named():
    with pytest.raises(ConfigError, match="has no hidden_size"):
        llama.ARCHITECTURE.keys(
            {key: value for key, value in LLAMA.items() if key != "hidden_size"}
        )


def test_windows_of_all_layers_are_read():
    window = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}
    assert llama.ARCHITECTURE.keys(LLAMA | window | {"max_window_layers": 0})["window"] == 4
    assert llama.ARCHITECTURE.keys(LLAMA | window | {"use_sliding_window": False})["window"] is None
    full = {"layer_types": ["full_attention"] * 2}
    assert llama.ARCHITECTURE.keys(LLAMA | window | full)["window"] is None


def test_a_window_that_transformers_does_not_use_is_not_read():
    window = {"sliding_window": 4}
    assert llama.ARCHITECTURE.keys(LLAMA | {"model_type": "qwen2"} | window)["window"] is None
    assert llama.ARCHITECTURE.keys(LLAMA | window)["window"] is None
    assert (
        llama.ARCHITECTURE.keys(LLAMA | {"model_type": "mistral", "sliding_window": None})["window"]
        is None
    )


def test_absent_keys_have_the_defaults_of_their_family():
    assert llama.ARCHITECTURE.keys(LLAMA | {"model_type": "mistral"})["window"] == 4096
    shorter = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert llama.ARCHITECTURE.keys(shorter)["num_kv_heads"] == LLAMA["num_attention_heads"]
    assert llama.ARCHITECTURE.keys(shorter | {"model_type": "mistral"})["num_kv_heads"] == 8
    capped = {key: value for key, value in DOCUMENTS["gemma 2"].items() if "softcap" not in key}
    assert gemma2.ARCHITECTURE.keys(capped)["logit_softcap"] == 30.0
    assert gemma2.ARCHITECTURE.keys(capped)["attention_softcap"] == 50.0
    assert (
        gemma2.ARCHITECTURE.keys(capped | {"attn_logit_softcapping": None})["attention_softcap"]
        is None
    )


@pytest.mark.slow
@every_document
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_defaults_are_those_of_transformers(name):
    config = pytest.importorskip("transformers").AutoConfig
    document = DOCUMENTS[name]
    read = architecture_of(document).keys
    compared = 0
    for absent in document.keys() - {"model_type"}:
        shorter = {key: value for key, value in document.items() if key != absent}
        try:
            keys = read(shorter)
        except ConfigError:
            continue  # refused, not read otherwise
        kind = shorter.pop("model_type")
        assert keys == read(config.for_model(kind, **shorter).to_dict()), absent
        compared += 1
    assert compared or document is GPT2, "no key is optional"


def test_positions_of_transformers_5_are_read():
    old = LLAMA | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    both = {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert llama.ARCHITECTURE.keys(new | {"rope_parameters": both}) == llama.ARCHITECTURE.keys(old)


def test_every_family_is_found():
    names = ARCHITECTURES.names()
    assert names == [
        "exported",
        "gemma",
        "gemma2",
        "gpt-neox",
        "gpt2",
        "llama",
        "nanogpt",
        "temporal-eigenstate",
    ]
    types = [kind for name in names for kind in ARCHITECTURES.get(name).classes]
    assert len(types) == len({*types})
