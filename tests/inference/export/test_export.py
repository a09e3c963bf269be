"""An export is complete or absent, replaces only exports, and reads few weights at a time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from export_shapes import SHAPES
from safetensors.torch import load_file

from flatout.config.registry import MODELS
from flatout.data.conversation.templates import CHAT_TEMPLATE, named_template
from flatout.errors import OutputInUse
from flatout.inference.export.destination import require_free
from flatout.models.families.source import ForeignWeights, find_model
from flatout.ops import Ops
from flatout.storage.whole import MANIFEST
from flatout.training.checkpoint.merged import MergedWeights, read_merged
from flatout.training.run_dir import layout

pytestmark = pytest.mark.slow


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_safetensors_have_flatouts_names_and_are_read_again(make_run, export_to):
    run = make_run("llama", SHAPES["llama"])
    out, written = export_to(run, "safetensors")
    stored = read_merged(run / "checkpoints" / "step-0")
    found = load_file(out / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], weight) for name, weight in stored.items())
    assert (out / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    assert (written.model_class, written.needs_code) == (None, False)
    model = find_model(str(out))
    keys = {key: value for key, value in model.keys.items() if key != "kind"}
    model_class = MODELS.get(model.keys["kind"])
    config = model_class.check(keys, seq_len=16)
    loaded = ForeignWeights(model, model_class.on_meta(config, Ops.plain()))
    assert all(torch.equal(loaded.read(name), weight) for name, weight in stored.items())


def test_the_mark_says_what_was_exported(make_run, export_to):
    out, _ = export_to(make_run("gpt2", SHAPES["gpt2"]))
    mark = json.loads((out / MANIFEST).read_text())
    assert (mark["kind"], mark["to"], mark["run"], mark["step"]) == (
        "export",
        "huggingface",
        "gpt2",
        0,
    )


def test_the_chat_template_of_the_run_is_part_of_the_tokenizer(make_run, export_to):
    run = make_run("llama", SHAPES["llama"])
    template = named_template("plain", {"eos_token": "<|endoftext|>"})
    (run / CHAT_TEMPLATE).write_text(template.model_dump_json())
    out, _ = export_to(run)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == template.text


def test_a_summary_that_lacks_numbers_does_not_prevent_an_export(make_run, export_to):
    run = make_run("llama", SHAPES["llama"])
    layout.append_event(run, "end", steps=0, val_loss="low")
    out, _ = export_to(run)
    assert "not measured" in (out / "README.md").read_text()


@pytest.mark.parametrize("to", ["huggingface", "safetensors"])
def test_files_have_the_permissions_of_new_files_and_are_synced(
    make_run, export_to, monkeypatch, to
):
    """A power cut after the rename then leaves no empty file, and others can read the weights."""
    synced, fsync, umask = set(), os.fsync, os.umask(0o027)

    def noted(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.add(re.sub(r"\.[0-9a-f]{8}\.part$", "", name))
        fsync(descriptor)

    try:
        run = make_run("llama", SHAPES["llama"])
        monkeypatch.setattr(os, "fsync", noted)
        out, _ = export_to(run, to)
    finally:
        os.umask(umask)
    files = [*out.iterdir(), *(run / "checkpoints" / "step-0").iterdir()]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: "0o640" for path in files
    }
    assert {path.name for path in out.iterdir()} <= synced


def test_an_earlier_export_is_replaced_only_on_request(make_run, export_to, tmp_path):
    run = make_run("llama", SHAPES["llama"])
    out, _ = export_to(run, dtype="bfloat16")
    before = contents(out)
    with pytest.raises(OutputInUse, match="already contains an export"):
        export_to(run)
    assert contents(out) == before
    export_to(run, overwrite=True)
    assert contents(out)["model.safetensors"] != before["model.safetensors"]
    assert [path.name for path in tmp_path.glob("*llama-*")] == [out.name]


def test_an_export_survives_a_kill_at_every_rename(make_run, export_to, tmp_path):
    run = make_run("llama", SHAPES["llama"])
    out, _ = export_to(run, dtype="bfloat16")
    before = contents(out)
    program = """if True:
        import os, sys
        from pathlib import Path
        from flatout.storage.whole import replacing
        rename, left = Path.rename, [int(sys.argv[2])]
        def killed(self, target):
            if not left[0]:
                os._exit(9)
            left[0] -= 1
            return rename(self, target)
        Path.rename = killed
        with replacing(Path(sys.argv[1])) as folder:
            (folder / sys.argv[3]).write_text('{"kind": "export", "files": []}')
    """
    for renames in (0, 1):
        words = [sys.executable, "-c", program, str(out), str(renames), MANIFEST]
        assert subprocess.run(words, check=False).returncode == 9
        with pytest.raises(OutputInUse, match="already contains an export"):
            export_to(run)
        assert contents(out) == before
    words[-2] = "2"  # the new one is in place, the earlier one is not deleted yet
    assert subprocess.run(words, check=False).returncode == 9
    assert [*contents(out)] == [MANIFEST]
    export_to(run, overwrite=True)
    assert [path.name for path in tmp_path.glob("*llama-*")] == [out.name]


def test_other_files_are_never_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    require_free(tmp_path / "mine", overwrite=True)
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name, what in {
        "mine": "not part of an export",
        "file": "not a directory",
        "link": "not a directory",
    }.items():
        with pytest.raises(OutputInUse, match=what):
            require_free(tmp_path / name, overwrite=True)


@pytest.mark.parametrize("had_one", [False, True])
def test_a_failure_leaves_nothing_half_written(make_run, export_to, monkeypatch, tmp_path, had_one):
    run = make_run("llama", SHAPES["llama"])
    out = tmp_path / "llama-huggingface"
    if had_one:
        export_to(run)
    before = contents(out) if had_one else None
    read, names = MergedWeights.read, []

    def failing(self, name):
        names.append(name)
        if len(names) == 3:
            raise OSError(28, "No space left on device")
        return read(self, name)

    monkeypatch.setattr(MergedWeights, "read", failing)
    with pytest.raises(OSError, match="No space"):
        export_to(run, overwrite=True)
    assert (contents(out) if out.exists() else None) == before
    assert [path.name for path in tmp_path.glob("*llama-*")] == [out.name] * had_one
