"""Exports for transformers: their classes and modeling files compute the same logits and text."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from export_shapes import CLASSES, OWN_SHAPES, SHAPES
from tokenizers import processors

from flatout.cli.commands.generate import generate
from flatout.config.registry import MODELS
from flatout.data.tokenizers import parse_tokenizer
from flatout.data.tokenizers.make import of_bytes
from flatout.inference.export import modeling
from flatout.inference.export.export import export_run
from flatout.inference.export.huggingface import MODELING, no_stock_class
from flatout.inference.export.shards import INDEX
from flatout.inference.export.source import open_source
from flatout.inference.generate import Context
from flatout.inference.load import load_run
from flatout.models.families.source import ForeignWeights, find_model
from flatout.ops import Ops
from flatout.storage.whole import MANIFEST
from flatout.training.checkpoint.merged import read_merged

ALL = {**SHAPES, **OWN_SHAPES}
PROMPT = "the run "


@pytest.mark.slow
@pytest.mark.parametrize("shape", ALL)
def test_an_export_is_read_bit_for_bit(make_run, export_to, shape):
    run = make_run(shape, ALL[shape])
    out, written = export_to(run)
    assert written.model_class == CLASSES.get(shape, "FlatoutForCausalLM")
    assert written.needs_code == (shape in OWN_SHAPES)
    model = find_model(str(out))
    keys = {key: value for key, value in model.keys.items() if key != "kind"}
    model_class = MODELS.get(model.keys["kind"])
    config = model_class.check(keys, seq_len=16)
    loaded = ForeignWeights(model, model_class.on_meta(config, Ops.plain()))
    stored = read_merged(run / "checkpoints" / "step-0")
    assert set(stored) <= set(loaded.names())
    for name in loaded.names():
        wanted = stored[name] if name in stored else torch.zeros(())
        found = loaded.read(name)
        assert torch.equal(found, wanted.expand_as(found)), name


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("shape", ALL)
def test_transformers_computes_the_same_logits_and_text(make_run, export_to, shape):
    transformers = pytest.importorskip("transformers")
    run = make_run(shape, ALL[shape])
    out, written = export_to(run)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=written.needs_code
    ).eval()
    assert type(model).__name__ == written.model_class
    loader = re.search(r"tokenizer = (\w+)\.from_pretrained", (out / "README.md").read_text())[1]
    tokenizer = getattr(transformers, loader).from_pretrained(out)
    loaded = load_run(run, "last", device="cpu")
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens).logits, loaded.model.logits(tokens), rtol=1e-4, atol=1e-4
        )
    prompt = tokenizer(PROMPT, return_tensors="pt")
    assert prompt["input_ids"][0].tolist() == loaded.tokenizer.encode(PROMPT)
    found = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    assert found == greedy(loaded, len(found))
    assert len(found) > prompt["input_ids"].shape[1]
    assert tokenizer.decode(found) == loaded.tokenizer.decode(found)


def greedy(loaded, total, ids=None):
    """Return the ids, by default the prompt's, and those of the most likely tokens after them."""
    ids = [*(ids or loaded.tokenizer.encode(PROMPT))]
    while len(ids) < total:
        with torch.no_grad():
            ids.append(int(loaded.model.next_logits(torch.tensor([ids])).argmax()))
    return ids


@pytest.mark.slow
def test_a_text_of_another_tools_model_starts_as_its_tokenizer_starts_it(
    make_run, export_to, monkeypatch
):
    run = make_run("llama", SHAPES["llama"])
    loaded, (out, _) = load_run(run, "last", device="cpu"), export_to(run)
    ids = loaded.tokenizer.encode(PROMPT)
    (out / MANIFEST).unlink()
    theirs = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    first = (loaded.tokenizer.end_of_text, loaded.tokenizer.eot_id)
    theirs.post_processor = processors.TemplateProcessing(
        single=f"{first[0]} $A", special_tokens=[first]
    )
    theirs.save(str(out / "tokenizer.json"))
    seen, read = [], Context.read_text
    monkeypatch.setattr(Context, "read_text", lambda self, ids: seen.append(ids) or read(self, ids))
    (text,) = generate(out, PROMPT, max_tokens=4, temperature=0).samples
    assert text == loaded.tokenizer.decode(greedy(loaded, len(ids) + 5, [first[1], *ids])[1:])
    generate(run, PROMPT, checkpoint="last", max_tokens=1)
    assert seen == [[first[1], *ids], ids]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_sharded_and_narrow_exports_load_in_transformers(make_run, export_to):
    transformers = pytest.importorskip("transformers")
    run = make_run("wide", {**SHAPES["llama"], "d_model": 512, "num_layers": 2})
    out, _ = export_to(run, dtype="bfloat16", shard_mib=1)
    files = {*json.loads((out / INDEX).read_text())["weight_map"].values()}
    assert len(files) > 3
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    wanted = read_merged(run / "checkpoints" / "step-0")["token_embedding.weight"]
    assert torch.equal(model.get_input_embeddings().weight, wanted.to(torch.bfloat16))


@pytest.mark.slow
def test_the_files_of_an_export(make_run, export_to):
    run = make_run("llama", SHAPES["llama"])
    out, written = export_to(run)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert written.notes == []
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["dtype"], config["eos_token_id"]) == (
        "llama",
        "float32",
        256,
    )
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["model_max_length"]) == ("<|endoftext|>", 16)


@pytest.mark.slow
def test_the_named_tokens_of_a_loaded_tokenizer_stay(make_run, tmp_path):
    definition = json.loads(of_bytes().content)
    vocabulary = definition["model"]["vocab"]
    names = {"bos_token": "A", "eos_token": "B", "pad_token": "C"}
    theirs = parse_tokenizer(json.dumps(definition), "mine", named=names)
    for shape in ("llama", "qwen2"):
        source = replace(open_source(make_run(shape, SHAPES[shape])), tokenizer=theirs)
        made = export_run(source, tmp_path / shape, "huggingface", shard_mib=64)
        settings = json.loads(Path(made.path, "tokenizer_config.json").read_text())
        assert {name: settings[name] for name in names} == names
        generation = json.loads(Path(made.path, "generation_config.json").read_text())
        assert generation["pad_token_id"] == vocabulary["C"]
        assert generation["eos_token_id"] == vocabulary["B"]
        config = json.loads(Path(made.path, "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (
            vocabulary["A"],
            vocabulary["B"],
        )
        card = Path(made.path, "README.md").read_text()
        loader = "AutoTokenizer" if shape == "llama" else "PreTrainedTokenizerFast"
        assert f"tokenizer = {loader}.from_pretrained" in card
        assert any("PreTrainedTokenizerFast" in note for note in made.notes) == (shape == "qwen2")


@pytest.mark.slow
def test_a_shape_without_a_class_is_exported_with_its_code_and_shows_so(make_run, export_to):
    out, written = export_to(make_run("relu2", OWN_SHAPES["relu2"]))
    (note,) = written.notes
    assert "trust_remote_code=True" in note
    assert "llama: " in note
    assert note in (out / "README.md").read_text()
    wrapper = Path(modeling.__file__).with_name("wrapper.py")
    assert (out / f"{MODELING}.py").read_text() == wrapper.read_text()
    assert "auto_map" in json.loads((out / "config.json").read_text())


def test_a_reason_that_families_share_is_given_once():
    reasons = {"gpt2": "It is odd.", "llama": "It is wide.", "qwen3": "It is odd."}
    assert no_stock_class(reasons).endswith(" gpt2, qwen3: It is odd. llama: It is wide.")
