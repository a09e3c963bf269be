"""Files of Hugging Face datasets at hf://, and the cards that name them.

The code that reads the real hub runs against a local hub with the same layout.
"""

import pytest

from flatout.config.registry import DATASETS
from flatout.data.prepare.request.inputs import load_card

pytest.importorskip("huggingface_hub")

pytestmark = pytest.mark.slow

READ = """
import json, sys
from flatout.data.prepare.request import inputs as corpus
from flatout.errors import DataError
def texts(opened):
    return [row.text for part in opened.read_tasks for row in part.rows()]
answers = []
for name in sys.argv[1:]:
    try:
        opened = corpus.open_corpus([name])
        marks = [part.fingerprint for part in opened.read_tasks]
        validation = opened.validation and texts(opened.validation)
        answers.append({
            "texts": texts(opened), "split": opened.split, "fingerprint": opened.fingerprint,
            "marks": marks, "validation": validation,
        })
    except DataError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


CARDS = [name for name in DATASETS.names() if load_card(name).repository]


def test_every_card_reads_exactly_its_files(hub, ask_hub, parquet):
    cards = [load_card(name) for name in CARDS]
    for card in cards:
        files = [
            card.files.replace("*", "a", 1).replace("*", "b"),
            card.files.replace("*", "b", 1).replace("*", "a"),
        ]
        for number, path in enumerate(files):
            rows = [f"{card.files} file {number} row {row}" for row in range(3)]
            hub.put(
                card.repository,
                path,
                parquet({card.text_field: rows, "other": [1, 2, 3]}),
                commit=card.revision,
            )
        if card.validation is not None:
            hub.put(
                card.repository,
                card.validation.replace("*", "a"),
                parquet({card.text_field: ["held out"]}),
                commit=card.revision,
            )
        hub.put(card.repository, "README.md", b"not text to train on", commit=card.revision)
        hub.put(
            card.repository, "else/train-0.parquet", parquet({"text": ["no"]}), commit=card.revision
        )
    answers = ask_hub(READ, *CARDS)
    for card, answer in zip(cards, answers, strict=True):
        assert isinstance(answer, dict), answer
        assert answer["texts"] == [
            f"{card.files} file {number} row {row}" for number in (0, 1) for row in range(3)
        ]
        assert answer["split"] == card.split
        assert answer["validation"] == (["held out"] if card.validation else None)
        assert f"@{card.revision}/" in answer["marks"][0]


def test_the_fingerprint_is_the_files_checksum(hub, ask_hub, parquet):
    address = "hf://datasets/org/set/data/*.parquet"
    hub.put("org/set", "data/a.parquet", parquet({"text": ["one"]}))
    before, again = ask_hub(READ, address, address)
    assert "lfs=" in before["marks"][0]
    assert again == before
    hub.put("org/set", "data/a.parquet", parquet({"text": ["two"]}))
    assert ask_hub(READ, address)[0]["fingerprint"] != before["fingerprint"]


def test_rows_and_texts_are_read_and_missing_files_are_errors(hub, ask_hub):
    hub.put("org/set", "a/rows.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    hub.put("org/set", "a/b/text.md", b"three")
    hub.put("org/set", "README.md", b"of the set")
    said = {
        "hf://datasets/org/none/*.parquet": "org/none",
        "hf://datasets/org/set@nowhere/*.parquet": "nowhere",
        "hf://datasets/org/set/*.arrow": "No file matches",
        "hf://datasets/org/set/b.parquet": "There is nothing at",
    }
    found, *answers = ask_hub(READ, f"hf://datasets/org/set@{hub.COMMIT}/a", *said)
    assert found["texts"] == ["three", "one", "two"]
    for answer, words in zip(answers, said.values(), strict=True):
        assert isinstance(answer, str)
        assert words in answer
