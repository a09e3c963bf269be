"""Every family computes what transformers computes, and every table has an inverse.

expected.json contains logits and gradients that transformers computed;
`python tests/models/families/write_expected.py` writes it.
"""

import json
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

from flatout.config.registry import ARCHITECTURES
from flatout.errors import ConfigError
from flatout.models.families import gpt2, gpt_neox, llama, nanogpt, temporal_eigenstate

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
    model = model_with(DOCUMENTS[name], foreign_weights(DOCUMENTS[name]))
    logits, gradients = loss_and_gradients(model)
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=0, atol=1e-4)
    norms = {key: float(gradient.norm()) for key, gradient in gradients.items()}
    assert norms == pytest.approx(expected["gradient_norms"], rel=1e-3, abs=1e-6)


@pytest.mark.slow
@every_document
# from transformers' own code
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_gradient_is_that_of_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    document, weights = DOCUMENTS[name], foreign_weights(DOCUMENTS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        write_model(tmp_path, document, weights), attn_implementation="eager", dtype=torch.float32
    ).eval()
    logits = theirs(torch.tensor(TOKENS)).logits
    ours = model_with(document, weights)
    torch.testing.assert_close(ours.logits(torch.tensor(TOKENS)), logits, rtol=0, atol=1e-4)
    for name_, (actual, expected) in gradients_of_both(document, ours, theirs).items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * scale, msg=name_)


def gradients_of_both(document, ours, theirs):
    """Return the gradients by flatout's names. Every map is linear, up to a constant."""
    loss_and_gradients(ours)
    tokens = torch.tensor(TOKENS)
    logits = theirs(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    parameters = dict(theirs.named_parameters())
    parameters["embed_out.weight"] = theirs.lm_head.weight  # its name in files of GPT-NeoX
    gradients = {name: parameters[name].grad for name in foreign_weights(document)}
    linear = joined(document, gradients)
    constant = joined(document, {name: torch.zeros_like(each) for name, each in gradients.items()})
    named = ours.named_parameters()
    return {name: (one.grad, linear[name] - constant[name]) for name, one in named}


@every_document
def test_the_inverse_returns_the_same_tensors(name):
    weights, architecture = foreign_weights(DOCUMENTS[name]), architecture_of(DOCUMENTS[name])
    keys = architecture.keys(DOCUMENTS[name])
    maps = architecture.tensors(config_of(keys))
    assert sorted(one.name for one in maps) == sorted(dict(empty_model(keys).named_parameters()))
    back = {}
    for one in maps:
        whole = one.join([weights[foreign] for foreign in one.foreign])
        back |= dict(zip(one.foreign, one.split(whole), strict=True))
    assert back.keys() == weights.keys()
    for key, tensor in weights.items():
        assert torch.equal(back[key], tensor), key


@every_document
def test_the_document_of_the_keys_has_the_same_keys(name):
    architecture = architecture_of(DOCUMENTS[name])
    config = config_of(architecture.keys(DOCUMENTS[name]))
    assert architecture.why_not(config) is None
    document = architecture.document(config)
    assert document["model_type"] == DOCUMENTS[name]["model_type"]
    assert config_of(architecture.keys(json.loads(json.dumps(document)))) == config


def test_a_model_without_biases_is_written_with_biases_of_zero():
    small = {"vocab_size": 61, "num_layers": 1, "d_model": 32, "num_heads": 4}
    config = config_of({"kind": "transformer", **small})
    assert gpt_neox.ARCHITECTURE.why_not(config) is None
    maps = {one.name: one for one in gpt_neox.ARCHITECTURE.tensors(config)}
    output = maps["blocks.0.attention.output.weight"]
    weight, bias = output.split(torch.ones(32, 16))
    assert torch.equal(weight, torch.ones(32, 16))
    assert torch.equal(bias, torch.zeros(32))
    assert torch.equal(output.join([weight, bias]), weight)


BIASES = {"qkv_bias": True, "qk_norm": True}
SHAPES = [
    (llama, {"activation": "relu2"}, "model.activation is relu2"),
    (llama, {"logit_scale": 2.0}, "model.logit_scale is 2.0"),
    (llama, {"bias": True, "qk_norm": True}, "model.bias is True"),
    (llama, BIASES, "model.qkv_bias is True, but Qwen3"),
    (llama, {"bias": True, "qkv_bias": False}, "model.qkv_bias is False"),
    (gpt2, {"positions": "rotary"}, "model.positions is rotary"),
    (gpt2, {"activation": "relu2"}, "model.activation is relu2"),
    (gpt2, {"num_kv_heads": 2}, "model.num_kv_heads is 2, but GPT2LMHeadModel would have 4"),
    (gpt2, {"head_dim": 4}, "model.head_dim is 4"),
    (gpt2, {"bias": False, "qkv_bias": True}, "model.bias is False"),
    (gpt_neox, {"norm": "rmsnorm"}, "model.norm is rmsnorm"),
]
EXAMPLES = {llama: "llama 2", gpt_neox: "pythia", gpt2: "gpt2"}


@pytest.mark.parametrize(("family", "changes", "reason"), SHAPES)
def test_a_shape_that_no_class_has_is_named(family, changes, reason):
    document = DOCUMENTS[EXAMPLES[family]]
    config = config_of(family.ARCHITECTURE.keys(document) | changes)
    assert reason in family.ARCHITECTURE.why_not(config)
    eigenstate = config_of({"kind": "eigenstate", "vocab_size": 9})
    assert family.ARCHITECTURE.why_not(eigenstate) == "It is not a transformer."


@pytest.mark.parametrize("family", [nanogpt, temporal_eigenstate])
def test_checkpoints_of_training_programs_are_only_read(family):
    assert "only reads" in family.ARCHITECTURE.why_not(None)


QWEN_2 = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}
UNREADABLE = [
    ({"hidden_act": "relu"}, "hidden_act='relu'"),
    ({"attention_bias": True}, "not in both"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "by 'yarn'"),
    ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]"),
    ({"hidden_size": None}, "hidden_size=None"),
    ({"hidden_size": "32"}, "hidden_size='32'"),
    ({**QWEN_2, "max_window_layers": 1}, "Some layers"),
]


@pytest.mark.parametrize(("changes", "reason"), UNREADABLE)
def test_what_flatout_cannot_compute_is_rejected(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        llama.ARCHITECTURE.keys(LLAMA | changes)


def test_a_missing_size_is_named():
    with pytest.raises(ConfigError, match="has no hidden_size"):
        llama.ARCHITECTURE.keys(without(LLAMA, "hidden_size"))


def without(document, word):
    """Return a document without the keys that contain a word."""
    return {key: value for key, value in document.items() if word not in key}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (QWEN_2 | {"max_window_layers": 0}, 4),
        (QWEN_2 | {"use_sliding_window": False}, None),
        (QWEN_2 | {"layer_types": ["full_attention"] * 2}, None),
        ({"model_type": "qwen2", "sliding_window": 4}, None),
        ({"sliding_window": 4}, None),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),
    ],
)
def test_a_window_is_read_where_transformers_uses_it_in_all_layers(changes, window):
    assert llama.ARCHITECTURE.keys(LLAMA | changes)["window"] == window


def test_absent_keys_have_the_defaults_of_their_family():
    shorter = without(LLAMA, "num_key_value_heads")
    assert llama.ARCHITECTURE.keys(shorter)["num_kv_heads"] == LLAMA["num_attention_heads"]
    assert llama.ARCHITECTURE.keys(shorter | {"model_type": "mistral"})["num_kv_heads"] == 8


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
            continue  # rejected, not read otherwise
        kind = shorter.pop("model_type")
        assert keys == read(config.for_model(kind, **shorter).to_dict()), absent
        compared += 1
    assert compared or document is GPT2, "no key is optional"


def test_positions_of_transformers_5_are_read():
    old = LLAMA | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}
    found = llama.ARCHITECTURE.keys(without(LLAMA, "rope_theta") | {"rope_parameters": new})
    assert found == llama.ARCHITECTURE.keys(old)


def test_every_family_is_found():
    names = "exported gpt-neox gpt2 llama nanogpt temporal-eigenstate"
    assert " ".join(ARCHITECTURES.names()) == names
    types = [kind for name in ARCHITECTURES.names() for kind in ARCHITECTURES.get(name).classes]
    assert len(types) == len({*types})
