"""`flatout export`: where it writes, what it says, and what it rejects."""

import json
import shutil
import sys

import pytest

from flatout.cli import main as cli
from flatout.cli.commands.export import export
from flatout.errors import CheckpointError, ConfigError, MissingPackage, OutputInUse, UsageError
from flatout.inference.export import packages
from flatout.training.run_dir.layout import read_summary

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
    card, summary = (out / "README.md").read_text(), read_summary(tiny_run)
    for part in (
        "library_name: transformers",
        f"| validation loss | {summary['val_loss']:.4f} nats per token |",
        f"| tokens trained on | {summary['tokens']:,} |",
        "| dataset | data |",
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


def test_without_the_package_the_error_names_the_install_line(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as missing:
        export(tiny_run, to="gguf", out=tmp_path / "out")
    assert "flatout[gguf]" in missing.value.fix


def test_custom_code_is_only_exported_as_safetensors(tiny_run, tmp_path, monkeypatch):
    from flatout.inference.export.huggingface import _wrapper
    from flatout.inference.export.source import open_source

    source = open_source(tiny_run)
    mine = source.config.with_values({"model.kind": "mine:MODEL"})
    object.__setattr__(source, "config", mine)
    with pytest.raises(ConfigError, match="its code is not a part of flatout") as refused:
        _wrapper(source)
    assert "--to safetensors" in refused.value.fix
