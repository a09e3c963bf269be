import json
import subprocess
import sys

import pytest
import torch

from flatout.cli import main as cli
from flatout.cli.commands.import_ import COMMAND, import_chunks
from flatout.config.registry import COMMANDS

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
    assert (result.tokens, result.documents) == (300, 100)
    assert result.tokens_per_s > 0
    lines = result.summary().splitlines()
    assert "tokens     300 of 100 documents, 200 bytes of text" in lines
    assert "from       5 files" in lines
    assert "already exists" in import_chunks(folder, folder.parent / "set", "byte").summary()


def test_the_command_is_named_import(folder, monkeypatch, capsys):
    assert COMMANDS.get("import") is COMMAND
    monkeypatch.setenv("HOME", str(folder.parent))  # a home directory is expanded
    words = ["import", f"~/{folder.name}", "--out", "~/set", "--tokenizer", "byte", "--json"]
    assert cli.execute(words) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["tokens"], answer["path"]) == (300, str(folder.parent / "set"))
    assert (folder.parent / "set" / "manifest.json").exists()


def test_a_missing_chunk_is_reported_before_torch_is_loaded(folder):
    (folder / "chunk_000002.pt").unlink()
    code = (
        f"import sys\nfrom flatout.cli.main import main\ntry:\n main(['import', {str(folder)!r}, "
        f"'--out', 'x', '--tokenizer', 'byte'])\n"
        "except SystemExit as stop:\n print(stop.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert "has no chunk 2." in done.stderr
