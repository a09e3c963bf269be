import json
import subprocess
import sys

import pytest
import torch

from flatout.commands.import_ import COMMAND, import_chunks
from flatout.registry import COMMANDS

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "chunks").mkdir()
    for number in range(5):
        torch.save(
            torch.tensor([72, 105, 256] * 20), tmp_path / "chunks" / f"chunk_{number:06d}.pt"
        )
    return tmp_path / "chunks"


def test_chunks_become_a_dataset(folder):
    result = import_chunks(folder, folder.parent / "set", "byte")
    assert (result.chunks, result.tokens, result.documents) == (5, 300, 100)
    assert result.tokens_per_s > 0
    assert "300 tokens of 100 documents, from 5 files" in result.summary()
    one = result.model_copy(update={"chunks": 1, "documents": 1, "tokens": 1200})
    assert "1,200 tokens of 1 document, from 1 file" in one.summary()
    assert "already exists" in import_chunks(folder, folder.parent / "set", "byte").summary()


def test_the_command_is_named_import(folder):
    assert COMMANDS.get("import") is COMMAND
    out = folder.parent / "set"
    words = [
        sys.executable,
        "-m",
        "flatout",
        "import",
        str(folder),
        "--out",
        str(out),
        "--tokenizer",
        "byte",
        "--json",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["tokens"] == 300


def test_a_home_directory_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    made = import_chunks(f"~/{folder.name}", "~/set", tokenizer="byte")
    assert made.path == str(folder.parent / "set")
    assert (folder.parent / "set" / "manifest.json").exists()


def test_a_missing_chunk_is_reported_before_torch_is_loaded(folder):
    (folder / "chunk_000002.pt").unlink()
    code = (
        f"import sys\nfrom flatout.cli import main\ntry:\n main(['import', {str(folder)!r}, "
        f"'--out', 'x', '--tokenizer', 'byte'])\n"
        "except SystemExit as stop:\n print(stop.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert "has no chunk 2." in done.stderr
