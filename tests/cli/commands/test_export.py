"""`flatout export`: where it writes, what it says, and what it rejects."""

import json
import shutil
import sys

import pytest
from foreign_models import LLAMA, write_model

from flatout.cli import main as cli
from flatout.cli.commands.export import export
from flatout.cli.commands.prepare import prepare
from flatout.cli.commands.train import train
from flatout.config.schema import load_config
from flatout.data.tokenizers.make import of_bytes
from flatout.errors import CheckpointError, ConfigError, OutputInUse, UsageError
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow


def test_an_export_is_described(tiny_run, tmp_path):
    out = tmp_path / "hf"
    found = export(tiny_run, out=out)
    assert (found.path, found.format, found.run) == (str(out), "huggingface", str(tiny_run))
    assert found.checkpoint.endswith("step-2")
    assert found.model_class == "GPTNeoXForCausalLM"
    sizes = [path.stat().st_size for path in out.iterdir()]
    assert (found.files, found.bytes) == (len(sizes), sum(sizes))
    for part in (found.path, "GPTNeoXForCausalLM", "drops characters"):
        assert part in found.summary()
    card, summary = (out / "README.md").read_text(), RunLog(tiny_run).summary
    for part in (
        "library_name: transformers",
        f"| validation loss | {summary['val_loss']:.4f} nats per token |",
        f"| trained on | data, {summary['steps']} steps and {summary['tokens']:,} tokens |",
        "| licence | not stated",
        "AutoModelForCausalLM.from_pretrained(DIR)",
    ):
        assert part in card
    assert str(tiny_run.parent) not in card


def test_by_default_it_is_written_in_the_run_directory(tiny_run, tmp_path, capsys):
    run = shutil.copytree(tiny_run, tmp_path / "tiny")
    assert cli.execute(["export", str(run), "--to", "safetensors", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["path"] == str(run / "export-safetensors")
    assert (answer["format"], answer["model_class"]) == ("safetensors", None)


def test_a_step_and_a_type_are_chosen(tiny_run, tmp_path):
    wide = export(tiny_run, out=tmp_path / "wide")
    narrow = export(tiny_run, out=tmp_path / "narrow", checkpoint="2", dtype="float16")
    assert narrow.bytes < 0.8 * wide.bytes
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        export(tiny_run, out=tmp_path / "x", checkpoint="7")


@pytest.mark.parametrize(
    ("out", "error"), [("s3://bucket/x", UsageError), ("here/file", OutputInUse)]
)
def test_mistakes_are_reported_before_torch_is_loaded(tiny_run, tmp_path, monkeypatch, out, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("mine")
    monkeypatch.setitem(sys.modules, "flatout.inference.export.export", None)
    with pytest.raises(error):
        export(tiny_run, out=out)


def test_custom_code_is_only_exported_as_safetensors(tiny_run, tmp_path, monkeypatch):
    from flatout.inference.export.huggingface import _wrapper
    from flatout.inference.export.source import open_source

    source = open_source(tiny_run)
    mine = source.config.with_values({"model.kind": "mine:MODEL"})
    object.__setattr__(source, "config", mine)
    with pytest.raises(ConfigError, match="its code is not a part of flatout") as refused:
        _wrapper(source)
    assert "--to safetensors" in refused.value.fix


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def base(tmp_path):
    """The directory of a model whose turns end with <|im_end|> (258), and its texts with 256."""
    folder = write_model(tmp_path / "base", LLAMA | {"vocab_size": 260})
    definition = json.loads(of_bytes().content)
    (added,) = definition["added_tokens"]
    definition["added_tokens"] += [
        added | {"id": index, "content": content}
        for index, content in ((257, "<|im_start|>"), (258, "<|im_end|>"), (259, "<|call|>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.quick_cases("None-[256, 258]")
@pytest.mark.parametrize(
    ("generation", "stops"),
    [
        (None, [256, 258]),
        ({"eos_token_id": 256}, [256, 258]),
        ({"eos_token_id": [259, 258]}, [256, 258, 259]),
        ({"eos_token_id": [256, 999]}, [256, 258]),
    ],
    ids=str,
)
def test_generation_ends_after_a_turn_and_where_the_base_model_ends(
    base, tmp_path, generation, stops
):
    if generation is not None:
        (base / "generation_config.json").write_text(json.dumps(generation))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [json.dumps({"messages": turns, "id": number}) for number in range(20)]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    data = tmp_path / "data"
    prepare([str(tmp_path / "chat.jsonl")], data, tokenizer=str(base), chat="auto", workers=1)
    short = ["data.seq_len=32", "batch.tokens_per_step=64", "train.steps=1", "train.device=cpu"]
    first, second = tmp_path / "first", tmp_path / "second"
    train(load_config(None, [*short, f"data.path={data}", f"train.init_from={base}"]), run=first)
    train(load_config(first / "config.yaml", [f"train.init_from={first}"]), run=second)
    export(second, out=tmp_path / "hf")
    found = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert found["eos_token_id"] == stops
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == 256, "of a text"
