"""Datasets by name, read by the package `datasets` from a hub with the layout of the real one."""

import json
import sys

import pytest

from flatout.data.prepare.request.inputs import open_corpus
from flatout.errors import DataError, MissingPackage

READ = """
import json, pickle, sys
from flatout.data.prepare.request.inputs import open_corpus
from flatout.data.prepare.request.options import Options
from flatout.errors import DataError
answers = []
for name, fields in json.loads(sys.argv[1]):
    try:
        opened = open_corpus([name], Options(**fields))
        parts = [list(pickle.loads(pickle.dumps(part)).rows()) for part in opened.read_tasks]
        answers.append({
            "parts": [[getattr(row, "text", None) or row.reason for row in rows] for rows in parts],
            "prompts": [getattr(row, "prompt", None) for rows in parts for row in rows],
            "fingerprints": [part.fingerprint for part in opened.read_tasks]})
    except DataError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


@pytest.fixture
def stories(hub, parquet):
    """org/stories: a training split of two files, a validation split of one."""
    pytest.importorskip("datasets")
    for number in range(2):
        content = {
            "text": [f"file {number} row {row}" for row in range(3)],
            "meta": [{"q": f"ask {row}"} for row in range(3)],
        }
        hub.put("org/stories", f"data/train-0000{number}-of-00002.parquet", parquet(content))
    hub.put(
        "org/stories",
        "data/validation-00000-of-00001.parquet",
        parquet({"text": ["held out", None, ""], "meta": [{"q": None}] * 3}),
    )
    return hub


def test_each_shard_is_a_task_at_a_commit(stories, ask_hub):
    masked = {"mask_field": "meta.q"}
    validation = f"hub:org/stories:split=validation,revision={stories.COMMIT}"
    plain, prompted, held_out = ask_hub(
        READ,
        json.dumps([["hub:org/stories", {}], ["hub:org/stories", masked], [validation, masked]]),
    )
    assert isinstance(plain, dict), plain
    assert plain["parts"] == [
        [f"file {number} row {row}" for row in range(3)] for number in range(2)
    ]
    assert plain["fingerprints"] == [f"hub org/stories None train {stories.COMMIT}", ""]
    assert prompted["prompts"] == ["ask 0", "ask 1", "ask 2"] * 2
    assert held_out["parts"] == [["held out", "'text' is not text", "empty document"]]


def test_missing_objects_are_an_error(stories, ask_hub):
    said = [
        ("hub:org/none", {}, "The dataset org/none at revision main cannot be opened"),
        ("hub:org/stories:revision=old", {}, "at revision old cannot be opened"),
        ("hub:org/stories:revision=12e4", {}, "at revision 12e4 cannot be opened"),
        ("hub:org/stories:split=tests", {}, "split tests cannot be opened"),
        ("hub:org/stories:config=other", {}, "configuration other"),
        (
            "hub:org/stories",
            {"text_field": "txt"},
            "has no field 'txt'. Fix: Did you mean --text-field text?",
        ),
        (
            "hub:org/stories",
            {"mask_field": "q"},
            "has no field 'q'. Fix: Its fields are: text, meta.",
        ),
    ]
    answers = ask_hub(READ, json.dumps([[name, fields] for name, fields, _ in said]))
    for (name, _, words), answer in zip(said, answers, strict=True):
        assert isinstance(answer, str), name
        assert words in answer


def test_a_damaged_file_is_an_error_not_the_end_of_the_stream(stories, ask_hub):
    place = f"/datasets/org/stories/resolve/{stories.COMMIT}/data/train-00001-of-00002.parquet"
    stories.files[place] = stories.files[place][:40] + bytes(60) + stories.files[place][100:]
    (answer,) = ask_hub(READ, json.dumps([["hub:org/stories", {}]]))
    assert isinstance(answer, str), answer
    assert "org/stories, train, shard 1 cannot be read after row 0" in answer


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        MissingPackage,
        match=r"hub:org/set needs the package huggingface_hub.*pip install \"flatout\[hub\]\"",
    ):
        open_corpus(["hub:org/set"])


def test_a_name_is_needed():
    with pytest.raises(DataError, match=r"hub.*name"):
        open_corpus(["hub"])
