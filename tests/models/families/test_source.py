"""Which paths are models of other tools, and what is rejected before a tensor is read."""

import json
from contextlib import suppress

import pytest
import torch
from foreign_models import (
    DOCUMENTS,
    LLAMA,
    config_of,
    empty_model,
    foreign_weights,
    joined,
    write_model,
)
from safetensors.torch import save_file

from flatout.errors import CheckpointError, ConfigError
from flatout.models.families.source import ForeignWeights, find_model, is_foreign


@pytest.fixture
def theirs(tmp_path):
    return write_model(tmp_path / "theirs", LLAMA)


def fit(path, **changes):
    found = find_model(str(path))
    keys = found.keys | changes
    model = empty_model(keys)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    weights = ForeignWeights(found, model)
    weights.require_fit(shapes)
    return weights


def test_models_of_other_programs_are_distinguished_from_runs(theirs, tmp_path):
    assert is_foreign("hf:org/name")
    assert is_foreign(str(theirs))
    assert is_foreign(str(theirs / "model.safetensors"))
    (tmp_path / "only").mkdir()
    assert not is_foreign(str(tmp_path / "only"))
    torch.save({}, tmp_path / "only" / "chunk_000000.pt")
    assert not is_foreign(str(tmp_path / "only"))
    assert not is_foreign(str(tmp_path / "only" / "chunk_000000.pt"))
    torch.save({}, tmp_path / "only" / "ckpt.pt")
    assert is_foreign(str(tmp_path / "only"))
    assert is_foreign(str(tmp_path / "only" / "ckpt.pt"))
    torch.save({}, tmp_path / "only" / "any.pt")
    (tmp_path / "only" / "ckpt.pt").unlink()
    assert is_foreign(str(tmp_path / "only")), "one file beside chunks"
    torch.save({}, tmp_path / "only" / "other.pt")
    assert is_foreign(str(tmp_path / "only")), "which of them is asked later"
    (tmp_path / "only" / "train.bin").write_bytes(bytes(range(256)))
    assert not is_foreign(str(tmp_path / "only" / "train.bin"))
    for name in ("config.yaml", "index.json"):
        (theirs / name).write_text("")
        assert is_foreign(str(theirs)), "a file that lies beside the weights decides nothing"
        assert is_foreign(str(theirs / "model.safetensors"))
    (theirs / "events.jsonl").write_text("")
    assert not is_foreign(str(theirs)), "now it is a run"
    (theirs / "config.yaml").unlink()
    (theirs / "manifest.json").write_text('{"kind": "checkpoint"}')
    assert not is_foreign(str(theirs / "model.safetensors"))
    assert not is_foreign(str(tmp_path / "missing"))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_tensor_is_read_under_its_name(tmp_path, name):
    document = DOCUMENTS[name]
    folder = write_model(tmp_path, document)
    weights = fit(folder)
    wanted = joined(document, foreign_weights(document))
    assert sorted(weights.names()) == sorted(wanted)
    for key, tensor in wanted.items():
        assert torch.equal(weights.read(key), tensor)


@pytest.mark.parametrize("kept", ["lm_head.weight", "transformer.wte.weight"])
def test_a_tied_head_is_read_under_either_of_its_names(tmp_path, kept):
    """A save of accelerate omits one name of tensors that share memory."""
    document = DOCUMENTS["gpt2"]
    whole = foreign_weights(document)
    shared = whole.pop("transformer.wte.weight")
    whole.pop("lm_head.weight", None)
    write_model(tmp_path, document)
    save_file(whole | {kept: shared}, tmp_path / "model.safetensors")
    assert torch.equal(fit(tmp_path).read("token_embedding.weight"), shared.float())


def test_the_prefix_of_the_family_may_be_absent(tmp_path):
    """The published files of GPT-2 have none."""
    document = DOCUMENTS["gpt2"]
    whole = foreign_weights(document)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in whole.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    weights = fit(write_model(tmp_path, document, bare))
    assert torch.equal(weights.read("token_embedding.weight"), whole["transformer.wte.weight"])


def test_a_file_is_described_by_the_config_beside_it(theirs):
    assert find_model(str(theirs / "model.safetensors")).keys == find_model(str(theirs)).keys
    torch.save(foreign_weights(LLAMA), theirs / "pytorch_model.bin")
    assert fit(theirs / "pytorch_model.bin").names() == fit(theirs).names()


def test_a_head_that_differs_from_the_tied_embedding_is_rejected(tmp_path):
    document = LLAMA | {"tie_word_embeddings": True}
    weights = foreign_weights(document)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    copied = fit(write_model(tmp_path / "copied", document, weights))
    assert "unembedding.weight" not in copied.names()
    weights["lm_head.weight"][5, 7] += 1e-3
    with pytest.raises(CheckpointError, match=r"lm_head\.weight, with other values than the embed"):
        fit(write_model(tmp_path, document, weights))
    untied = document | {"tie_word_embeddings": False}
    head = fit(write_model(tmp_path / "untied", untied, weights)).read("unembedding.weight")
    assert torch.equal(head, weights["lm_head.weight"])


@pytest.mark.parametrize("tied", [{"tie_word_embeddings": False}, {}])
def test_a_missing_head_is_answered_with_the_key_that_ties_it(tmp_path, tied):
    document = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"} | tied
    weights = foreign_weights(LLAMA)
    del weights["lm_head.weight"]
    folder = write_model(tmp_path, document, weights)
    with pytest.raises(CheckpointError, match=r"has no lm_head\.weight\. Fix: .*get the file with"):
        fit(folder)
    document["tie_word_embeddings"] = True  # as the fix says
    (folder / "config.json").write_text(json.dumps(document))
    assert "unembedding.weight" not in fit(folder).names()


def test_model_safetensors_is_read_even_beside_the_index_of_older_shards(theirs):
    old = foreign_weights(LLAMA)
    old["model.norm.weight"] = torch.full((32,), -0.25)
    save_file(old, theirs / "model-00001-of-00001.safetensors")
    for end, shard in (("safetensors", "model-00001-of-00001.safetensors"), ("bin", "gone.bin")):
        name = f"{'model' if end == 'safetensors' else 'pytorch_model'}.{end}.index.json"
        index = {"weight_map": dict.fromkeys(old, shard)}
        (theirs / name).write_text(json.dumps(index))
    new = foreign_weights(LLAMA)["model.norm.weight"]
    assert torch.equal(fit(theirs).read("final_norm.weight"), new)
    (theirs / "model.safetensors").rename(theirs / "part-a.safetensors")
    assert float(fit(theirs).read("final_norm.weight")[0]) == -0.25  # what the index lists
    (theirs / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"has no model-00001.*files are part-a\.safetensors\."
    ):
        fit(theirs)
    (theirs / "model.safetensors").symlink_to("blobs/gone")
    with pytest.raises(
        ConfigError, match=r"model\.safetensors is a link to blobs/gone, which does"
    ):
        fit(theirs)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("entries", "keys"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, {"rotary_base": 5e4}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, "rope_theta": 1e4},
            {"rotary_base": 5e4},
        ),
        ({"rope_scaling": {"type": None}, "rope_theta": 500_000}, {"rotary_base": 5e5}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": 5e5},
            {"rotary_base": 5e5},
        ),
        ({"rope_scaling": None, "partial_rotary_factor": 1.0}, {"rotary_base": 1e4}),
        (
            {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 1e4},
            {"rotary_scaling": "linear", "rotary_factor": 4.0, "rotary_base": 1e4},
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_theta": 500_000}},
            {"rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_base": 5e5},
        ),
    ],
)
def test_rotary_positions_are_read_from_old_and_new_entries(theirs, entries, keys):
    document = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    (theirs / "config.json").write_text(json.dumps(document | entries))
    config = config_of(find_model(str(theirs)).keys)
    wanted = {"rotary_scaling": "none", "rotary_factor": 1.0} | keys
    assert {key: getattr(config, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("entries", "about"),
    [
        ({"rope_scaling": {"factor": 4.0}}, r"has factor=4\.0 .*without a rope_type"),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            r"has rope_parameters=.* and rope_scaling=.*, which differ",
        ),
        ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, r"factor=4\.0 .*'default'"),
        ({"rope_scaling": {"type": "linear"}}, r"has no rope_scaling\.factor\."),
        ({"rope_scaling": {"type": "linear", "factor": "4.0"}}, r"factor='4\.0', .* not a number"),
        (
            {"rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if key != "low_freq_factor"}},
            r"has no rope_scaling\.low_freq_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1.0}},
            "scales rotary positions by 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "scales rotary positions by"),
        ({"rope_scaling": "linear"}, r"rope_scaling='linear', which is not a mapping"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\], which is not a mapping"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention="),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=0\.5"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4', which is not a number"),
        ({"tie_word_embeddings": "false"}, "='false', which is not true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small', which is not a number"),
    ],
)
def test_no_scaling_of_rotary_positions_is_guessed_or_ignored(theirs, entries, about):
    (theirs / "config.json").write_text(json.dumps(LLAMA | entries))
    with pytest.raises(ConfigError, match=about):
        find_model(str(theirs))


def test_missing_unknown_and_reshaped_tensors_are_named(tmp_path):
    weights = foreign_weights(LLAMA)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.norm.weight"] = torch.ones(31)
    weights["model.layers.0.adapter"] = torch.ones(3)
    with pytest.raises(CheckpointError) as refused:
        fit(write_model(tmp_path, LLAMA, weights))
    assert "it has no model.layers.1.mlp.up_proj.weight;" in refused.value.what
    assert "model.norm.weight is [31], and its configuration means [32];" in refused.value.what
    assert "it has model.layers.0.adapter, which the architecture lacks." in refused.value.what
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\..*and \d+ more"):
        fit(write_model(tmp_path / "other", LLAMA | {"num_hidden_layers": 4}, weights))


WRONG = (
    0,
    -1,
    0.5,
    True,
    None,
    "abc",
    "",
    [],
    [1],
    {},
    {"type": "linear"},
    {"rope_type": "llama3"},
)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_damaged_values_of_config_json_are_rejected_or_tolerated(theirs, name):
    """The checks of the configuration come after the reader of config.json, and reject the rest."""
    keys = {*DOCUMENTS[name], "rope_scaling", "rope_parameters", "layer_types", "head_dim"}
    for key in sorted(keys - {"model_type"}):
        for wrong in WRONG:
            (theirs / "config.json").write_text(json.dumps(DOCUMENTS[name] | {key: wrong}))
            with suppress(ConfigError):
                config_of(find_model(str(theirs)).keys)


def test_weights_that_are_not_finite_are_named(tmp_path):
    weights = foreign_weights(LLAMA)
    weights["model.norm.weight"][3] = float("nan")
    read = fit(write_model(tmp_path, LLAMA, weights)).read
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight of .* not finite"):
        read("final_norm.weight")


def test_code_of_the_directory_is_never_imported(theirs, monkeypatch):
    (theirs / "modeling_own.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(theirs)
    assert find_model(str(theirs)).keys["num_layers"] == 2
    for changes, message in (
        ({"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}, "names code that defines"),
        ({"quantization_config": {"quant_method": "gptq"}}, "are quantised"),
    ):
        (theirs / "config.json").write_text(json.dumps(LLAMA | changes))
        with pytest.raises(ConfigError, match=message):
            find_model(str(theirs))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"model_type": "lama"}', ConfigError, "architecture 'lama', which flatout does not read"),
        ('{"model_type": "mixtral", "num_local_experts": 8}', ConfigError, "a mixture of experts"),
        ("{}", CheckpointError, "do not tell its architecture"),
        ("[]", CheckpointError, "not a JSON object"),
        ("{", CheckpointError, "not JSON"),
    ],
)
def test_other_files_named_config_are_rejected(theirs, text, error, message):
    (theirs / "config.json").write_text(text)
    with pytest.raises(error, match=message):
        find_model(str(theirs))


def test_a_file_of_unknown_tensors_is_rejected(tmp_path):
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x\.safetensors \(a, b\) do not tell"):
        find_model(str(tmp_path / "x.safetensors"))


SIZES = {"num_hidden_layers": 10**9, "vocab_size": 10**12, "intermediate_size": 10**17}


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_configuration_larger_than_its_tensors_is_an_error_before_a_model_is_built(
    theirs, key, name
):
    document = json.loads((theirs / "config.json").read_text()) | {key: SIZES[key]}
    (theirs / "config.json").write_text(json.dumps(document))
    for whole in (True, False):  # plan does not need the weights, but they are here
        with pytest.raises(ConfigError, match="states a model of at least"):
            find_model(str(theirs / name), whole=whole, for_run=True)
