"""manifest.json of an export shows which of its files were changed or damaged."""

import json

import pytest

from flatout.errors import CheckpointError
from flatout.models.families.export_mark import require_as_exported, write_mark
from flatout.storage.whole import MANIFEST


@pytest.fixture
def export(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("# A model")
    write_mark(tmp_path, {"to": "huggingface", "step": 3})
    return tmp_path


def test_the_mark_says_what_the_export_was_made_from_and_lists_its_files(export):
    mark = json.loads((export / MANIFEST).read_text())
    assert (mark["kind"], mark["format_version"], mark["step"]) == ("export", 2, 3)
    assert [file["name"] for file in mark["files"]] == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    require_as_exported(export)


@pytest.mark.parametrize("content", [b"weighty", b"weight"])
def test_a_file_with_another_content_is_rejected_by_name(export, content):
    (export / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed") as refused:
        require_as_exported(export)
    assert MANIFEST in refused.value.fix
    (export / MANIFEST).unlink()
    require_as_exported(export)


@pytest.mark.parametrize("content", ['{"kind": "export", "files": 3}', '{"kind": "export"}', "{"])
def test_a_damaged_mark_is_rejected_by_name(export, content):
    (export / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match=MANIFEST):
        require_as_exported(export)


def test_an_edited_card_a_missing_file_and_a_manifest_of_another_tool_pass(export):
    (export / "README.md").write_text("edited")
    (export / "config.json").unlink()
    require_as_exported(export)
    (export / MANIFEST).write_text('{"files": ["model.safetensors"]}')
    (export / "model.safetensors").write_bytes(b"")
    require_as_exported(export)
