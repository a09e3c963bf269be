"""Datasets by name, read from a hub with the layout of the real one."""

import json

import pytest

from flatout.data.prepare.request.inputs import open_corpus
from flatout.errors import DataError

READ = """
import json, pickle, sys
from flatout.data.prepare.request.inputs import open_corpus
from flatout.data.prepare.request.options import Options
from flatout.errors import DataError
answers = []
for name, fields in json.loads(sys.argv[1]):
    try:
        opened = open_corpus([name], Options(**fields))
        tasks = pickle.loads(pickle.dumps(opened.read_tasks))
        rows = [row for task in tasks for row in task.rows()]
        answers.append({
            "rows": [getattr(row, "text", None) or row.reason for row in rows],
            "prompts": [getattr(row, "prompt", None) for row in rows],
            "fixes": [row.fix for row in rows if hasattr(row, "fix")],
            "fingerprints": [task.fingerprint for task in tasks]})
    except DataError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""
ROWS = [f"file {number} row {row}" for number in range(2) for row in range(3)]


@pytest.fixture
def stories(hub, parquet):
    """org/stories as its owner wrote it, and org/texts, which the hub converted to Parquet."""
    pytest.importorskip("huggingface_hub")
    pytest.importorskip("pyarrow")
    meta = [{"q": f"ask {row}"} for row in range(3)]
    for number in range(2):
        content = parquet({"text": ROWS[3 * number : 3 * number + 3], "meta": meta})
        hub.put("org/stories", f"data/train-0000{number}-of-00002.parquet", content)
        hub.put("org/texts", f"en/train/000{number}.parquet", content, commit=hub.CONVERTED)
    held_out = parquet({"text": ["held out", None, ""], "meta": [{"q": None}] * 3})
    hub.put("org/stories", "data/validation-00000-of-00001.parquet", held_out)
    hub.put("org/stories", "README.md", b"of the set")
    hub.put("org/texts", "rows.jsonl", b"{}")
    hub.put("org/texts", "de/test_sft/0000.parquet", held_out, commit=hub.CONVERTED)
    hub.put("org/texts", "de/partial-train/0000.parquet", held_out, commit=hub.CONVERTED)
    return hub


def test_a_split_is_read_at_a_commit(stories, ask_hub):
    masked = {"mask_field": "meta.q"}
    held_out = f"hub:org/stories:split=validation,revision={stories.COMMIT}"
    asked = [
        ("hub:org/stories", {}, ROWS),
        ("hub:org/stories:config=default,split=train,revision=main", masked, ROWS),
        (held_out, masked, ["held out", "'text' is not text", "empty document"]),
        ("hub:org/texts:config=en", {}, ROWS),
        (
            "hub:org/texts:config=de,split=test_sft",
            {},
            ["held out", "'text' is not text", "empty document"],
        ),
        ("hub:org/stories", {"text_field": "txt"}, ["no field 'txt'"] * 4),
        ("hub:org/stories", {"mask_field": "q"}, ["no field 'q'"] * 4),
    ]
    answers = ask_hub(READ, json.dumps([[name, fields] for name, fields, _ in asked]))
    for (name, _, rows), answer in zip(asked, answers, strict=True):
        assert isinstance(answer, dict), (name, answer)
        assert answer["rows"] == rows, name
    assert answers[1]["prompts"] == ["ask 0", "ask 1", "ask 2"] * 2
    assert answers[0]["fingerprints"] == [f"hub org/stories default train {stories.COMMIT}"]
    assert answers[3]["fingerprints"][0] == f"hub org/texts en train {stories.CONVERTED}"
    assert answers[5]["fixes"][0] == "Did you mean --text-field text?"


def test_missing_objects_are_an_error(stories, ask_hub):
    said = {
        "hub:org/none": "The dataset org/none at revision main cannot be opened",
        "hub:org/stories:revision=old": "at revision old cannot be opened",
        "hub:org/stories:revision=12e4": "at revision 12e4 cannot be opened",
        "hub:org/stories:split=trian": "has no split 'trian'. Fix: Add split=train, or a different "
        "one of: train, validation.",
        "hub:org/stories:config=other": "has no config 'other'. Fix: Add config=default",
        "hub:org/texts": "has several configurations. Fix: Add config=de, or a different one of: "
        "de, en.",
        "hub:org/texts:config=de": "has converted only the beginning of org/texts, train",
    }
    stories.put("org/raw", "rows.jsonl", b"{}")
    said |= {"hub:org/raw": "The dataset org/raw has no Parquet files. Fix: Name the files"}
    answers = ask_hub(READ, json.dumps([[name, {}] for name in said]))
    for (name, words), answer in zip(said.items(), answers, strict=True):
        assert isinstance(answer, str), name
        assert words in answer


def test_a_damaged_file_is_a_bad_row(stories, ask_hub):
    place = f"/datasets/org/stories/resolve/{stories.COMMIT}/data/train-00001-of-00002.parquet"
    stories.files[place] = stories.files[place][:40] + bytes(60) + stories.files[place][100:]
    (answer,) = ask_hub(READ, json.dumps([["hub:org/stories", {}]]))
    assert answer["rows"] == [*ROWS[:3], "cannot be read"]


def test_a_name_is_needed():
    with pytest.raises(DataError, match=r"hub.*name"):
        open_corpus(["hub"])
