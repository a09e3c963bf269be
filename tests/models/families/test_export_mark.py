"""flatout.json of an export shows which of its files were changed or damaged."""

import json

import pytest

from flatout.errors import CheckpointError
from flatout.models.families.export_mark import MARK, require_as_exported, write_mark


@pytest.fixture
def export(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    write_mark(tmp_path, {"to": "huggingface", "step": 3})
    (tmp_path / "README.md").write_text("# A model")
    return tmp_path


def test_the_mark_says_what_the_export_was_made_from_and_lists_its_files(export):
    mark = json.loads((export / MARK).read_text())
    assert (mark["format_version"], mark["to"], mark["step"]) == (1, "huggingface", 3)
    assert mark["files"].keys() == {"model.safetensors", "config.json"}
    require_as_exported(export)


@pytest.mark.parametrize("content", [b"weighty", b"weight"])
def test_a_file_with_another_content_is_rejected_by_name(export, content):
    (export / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was changed") as refused:
        require_as_exported(export)
    assert MARK in refused.value.fix
    (export / MARK).unlink()
    require_as_exported(export)


@pytest.mark.parametrize("content", ['{"files": 3}', '{"files": {"a": {}}}', "[]", "{"])
def test_a_damaged_mark_is_rejected_by_name(export, content):
    (export / MARK).write_text(content)
    with pytest.raises(CheckpointError, match=MARK):
        require_as_exported(export)


def test_an_export_of_an_earlier_version_and_other_files_are_not_checked(export):
    (export / "README.md").write_text("edited")
    (export / "config.json").unlink()
    require_as_exported(export)
    (export / MARK).write_text('{"format_version": 1, "to": "safetensors"}')
    (export / "model.safetensors").write_bytes(b"")
    require_as_exported(export)
