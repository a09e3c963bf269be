"""Files of Hugging Face data sets, hf://, and the cards that name some: the very code that reads the real hub, on a hub of its layout."""

import io

import pytest

from flatout.data.corpus import load_card
from flatout.registry import DATASETS

pyarrow = pytest.importorskip("pyarrow")
tables = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("huggingface_hub")

READ = """
import json, sys
from flatout.data import corpus
from flatout.errors import DataError
try:
    opened = corpus.open_corpus(sys.argv[1:])
    print(json.dumps({
        "texts": [row.text for part in opened.parts for row in part.rows()], "split": opened.split, "fingerprint": opened.fingerprint,
        "marks": [part.fingerprint for part in opened.parts]}))
except DataError as error:
    print(json.dumps(str(error)))
"""


def parquet(**columns) -> bytes:
    file = io.BytesIO()
    tables.write_table(pyarrow.table(columns), file)
    return file.getvalue()


CARDS = [name for name in DATASETS.names() if load_card(name).repository]


@pytest.mark.parametrize("name", CARDS)
def test_a_card_reads_its_files_and_no_others(hub, ask_hub, monkeypatch, name):
    card = load_card(name)
    monkeypatch.setattr(type(hub), "COMMIT", card.revision)
    places = [card.files.replace("*", "a", 1).replace("*", "b"), card.files.replace("*", "b", 1).replace("*", "a")]
    for number, place in enumerate(places):
        hub.put(card.repository, place, parquet(**{card.text_field: [f"file {number} row {row}" for row in range(3)], "other": [1, 2, 3]}))
    hub.put(card.repository, "README.md", b"not text to train on")
    hub.put(card.repository, "else/train-0.parquet", parquet(text=["no"]))
    answer = ask_hub(READ, name)
    assert isinstance(answer, dict), answer
    assert answer["texts"] == [f"file {number} row {row}" for number in (0, 1) for row in range(3)]
    assert answer["split"] == card.split
    assert f"@{card.revision}/" in answer["marks"][0]


def test_the_fingerprint_is_the_files_checksum(hub, ask_hub):
    hub.put("org/set", "data/a.parquet", parquet(text=["one"]))
    before = ask_hub(READ, "hf://datasets/org/set/data/*.parquet")
    assert "lfs=" in before["marks"][0]
    assert ask_hub(READ, "hf://datasets/org/set/data/*.parquet") == before
    hub.put("org/set", "data/a.parquet", parquet(text=["two"]))
    assert ask_hub(READ, "hf://datasets/org/set/data/*.parquet")["fingerprint"] != before["fingerprint"]


def test_rows_and_texts_are_read_too(hub, ask_hub):
    hub.put("org/set", "a/rows.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    hub.put("org/set", "a/b/text.md", b"three")
    hub.put("org/set", "README.md", b"of the set")
    assert ask_hub(READ, f"hf://datasets/org/set@{hub.COMMIT}/a")["texts"] == ["three", "one", "two"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hf://datasets/org/none/*.parquet", "org/none"),
        ("hf://datasets/org/set@nowhere/*.parquet", "nowhere"),
        ("hf://datasets/org/set/*.arrow", "No file matches"),
        ("hf://datasets/org/set/b.parquet", "There is nothing at"),
    ],
)
def test_what_is_not_there_is_said(hub, ask_hub, address, said):
    hub.put("org/set", "a.parquet", parquet(text=["one"]))
    answer = ask_hub(READ, address)
    assert isinstance(answer, str)
    assert said in answer
