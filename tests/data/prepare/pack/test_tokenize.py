from pathlib import Path

import pytest

from flatout.data.prepare.pack import tokenize as stage
from flatout.data.prepare.pack.range_files import RangeRecord, count_skipped
from flatout.data.prepare.pack.tokenize import Packing, Tally
from flatout.data.prepare.pack.work_items import (
    ByHash,
    ByPosition,
    WorkItem,
    cut_to_bytes,
    first_documents,
    hash_fraction,
)
from flatout.data.prepare.request.options import Options
from flatout.data.sources import FIRST_NAMED, BadRow, Document, LeftOut, ReadTask
from flatout.data.store.manifest import SPLITS
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import DataError

BAD = BadRow("is bad", "Mend it.", "bad", "row 7")


def read(rows):
    return rows


def task(*rows):
    return ReadTask(read, (list(rows),), "x", num_bytes=9)


class ListWriter:
    """A writer of shards that appends to lists by split."""

    def __init__(self):
        self.tokens, self.ends, self.masks = ({name: [] for name in SPLITS} for _ in range(3))
        self.text_bytes = dict.fromkeys(SPLITS, 0)
        self.calls = 0

    def append(self, split, tokens, ends, *, text_bytes, mask=None):
        self.masks[split] += [] if mask is None else mask.tolist()
        self.ends[split] += (len(self.tokens[split]) + ends).tolist()
        self.tokens[split] += tokens.tolist()
        self.text_bytes[split] += text_bytes
        self.calls += 1


class Packed:
    """The tokens of some read tasks by split, and the rows omitted."""

    def __init__(self, tasks, tokenizer, assignment, report=lambda _: None, first=0, **options):
        writer = ListWriter()
        self.record = RangeRecord(number=0, num_bytes=0)
        item = WorkItem(
            number=0, num_tasks=len(tasks), first=first, assignment=assignment, read_tasks=tasks
        )
        packing = Packing(tokenizer, Options(**options), Path())
        stage.pack(item, packing, writer, self.record, report)
        vars(self).update(vars(writer))


def pack(task, tokenizer, assignment, on_bad_row="raise", **more):
    return Packed([task], tokenizer, assignment, on_bad_row=on_bad_row, **more)


def counts(packed):
    return {rows.reason: rows.count for rows in packed.record.skipped}


def byte_tokens(packed, name):
    """Return a split as text, with | for end-of-text."""
    return "".join("|" if token == 256 else chr(token) for token in packed.tokens[name])


@pytest.fixture
def tokenizer():
    return make_tokenizer("byte", lambda limit: ())


def test_only_end_of_text_is_added_after_each_document(tokenizer):
    packed = pack(task("ab", "c", "def"), tokenizer, ByPosition(2, 0))
    assert byte_tokens(packed, "train") == "ab|c|"
    assert byte_tokens(packed, "val") == "def|"
    assert packed.ends == {"train": [3, 5], "val": [4]}
    assert packed.text_bytes == {"train": 3, "val": 3}


def test_text_bytes_count_utf8(tokenizer):
    packed = pack(task("é🙂"), tokenizer, ByPosition(1, 0))
    assert packed.text_bytes["train"] == 6


def test_document_indices_continue_from_the_previous_item(tokenizer):
    packed = pack(task("ab", "c"), tokenizer, ByPosition(10, 0), first=9)
    assert (byte_tokens(packed, "train"), byte_tokens(packed, "val")) == ("ab|", "c|")


def test_tail_cuts_a_document_by_characters(tokenizer):
    packed = pack(task("abcdé"), tokenizer, ByPosition(0, 3))
    assert byte_tokens(packed, "train") == "abc|"
    assert packed.tokens["val"] == [ord("d"), 0xC3, 0xA9, 256]


def test_the_hash_split_depends_on_the_text_alone(tokenizer):
    texts = [f"text {number}" for number in range(2000)]
    packed = pack(task(*texts), tokenizer, ByHash(0.1))
    val = byte_tokens(packed, "val").split("|")[:-1]
    assert val == [text for text in texts if hash_fraction(text) < 0.1]
    assert 140 < len(val) < 260
    again = pack(task(*reversed(texts)), tokenizer, ByHash(0.1), first=5)
    assert byte_tokens(again, "val").split("|")[:-1] == val[::-1]


def test_the_hash_split_depends_on_the_prompt_too(tokenizer):
    rows = [Document("yes", "row", f"Is {number} a number? ") for number in range(300)]
    packed = pack(task(*rows), tokenizer, ByHash(0.5), mask_field="prompt")
    assert 100 < len(packed.ends["val"]) < 200
    assert len(packed.ends["train"]) + len(packed.ends["val"]) == 300


def test_the_hash_of_a_text_is_fixed():
    assert hash_fraction("flatout") == pytest.approx(0.7773977660767666, rel=1e-12)


def test_a_bad_row_raises_or_is_counted(tokenizer):
    with pytest.raises(DataError, match="row 7 is bad"):
        pack(task("a", BAD, "b"), tokenizer, ByPosition(9, 0))
    packed = pack(
        task("a", BAD, LeftOut("too dull", "row 8"), "b"), tokenizer, ByPosition(9, 0), "skip"
    )
    assert byte_tokens(packed, "train") == "a|b|"
    assert counts(packed) == {"bad": 1, "too dull": 1}
    assert [rows.first for rows in packed.record.skipped] == [("row 7",), ("row 8",)]
    assert packed.record.bad_rows == 1, "rows omitted by a source are not bad"


def test_an_untokenisable_document_is_named_and_leaves_no_tokens():
    tokenizer = make_tokenizer("char", lambda limit: ["ab"])
    with pytest.raises(DataError, match=r"^book\.txt cannot be tokenised: Character 1, 'x'"):
        pack(task(Document("ax", "book.txt")), tokenizer, ByPosition(9, 0))
    packed = pack(task("a", "ax", "aaax", "b"), tokenizer, ByPosition(2, 2), "skip")
    assert packed.tokens == {"train": [0, 2], "val": [1, 2]}
    assert counts(packed) == {"cannot be tokenised": 2}


def test_a_task_stops_reading_at_its_limit(tokenizer):
    def endless():
        yield "a"
        yield BAD
        yield "bcd"
        raise AssertionError("read too far")

    limited = ReadTask(first_documents, (ReadTask(endless, (), "x"), 2, 2), "x")
    assert byte_tokens(pack(limited, tokenizer, ByPosition(9, 0), "skip"), "train") == "a|bc|"


def test_a_cut_document_keeps_its_prompt():
    (cut,) = first_documents(task(Document("text", "x", prompt="ask")), 1, 2)
    assert cut == Document("te", "x", prompt="ask")


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [("aé🙂", 7, "aé🙂"), ("aé🙂", 6, "aé"), ("aé🙂", 3, "aé"), ("aé🙂", 2, "a"), ("é", 1, "")],
)
def test_text_is_cut_between_characters(text, limit, kept):
    assert cut_to_bytes(text, limit) == kept


def test_the_first_skipped_rows_are_named_in_order():
    skipped = []
    for part in range(3):
        count_skipped(skipped, "bad", [f"{part}.{row}" for row in range(7)], 7)
    (entry,) = [rows.named() for rows in skipped]
    assert (entry.reason, entry.count) == ("bad", 21)
    assert entry.first == tuple(f"{row // 7}.{row % 7}" for row in range(FIRST_NAMED))


def test_held_tokens_are_bounded(tokenizer, monkeypatch):
    whole = pack(task("abc", "de", "f" * 9, "g"), tokenizer, ByPosition(9, 0))
    monkeypatch.setattr(stage, "HELD_TOKENS", 5)
    pieces = pack(task("abc", "de", "f" * 9, "g"), tokenizer, ByPosition(9, 0))
    assert (whole.calls, pieces.calls) == (1, 3)
    assert (pieces.tokens, pieces.ends, pieces.text_bytes) == (
        whole.tokens,
        whole.ends,
        whole.text_bytes,
    )


def test_progress_is_reported_per_task(tokenizer):
    reports = []
    Packed([task("ab", "c"), task("def")], tokenizer, ByPosition(9, 0), reports.append)
    assert reports == [Tally(9, 2, 5), Tally(9, 1, 4)]


@pytest.mark.parametrize("held", [1, 1 << 20])
def test_prompts_are_packed_before_the_text_and_masked(tokenizer, monkeypatch, held):
    monkeypatch.setattr(stage, "HELD_TOKENS", held)
    rows = [
        Document("yes", "x", prompt="ok?"),
        Document("plain", "x"),
        Document("abcd", "x", prompt="é"),
    ]
    masked = pack(task(*rows), tokenizer, ByPosition(2, 2), mask_field="prompt")
    assert byte_tokens(masked, "train") == "ok?yes|plain|Ã©ab|"
    assert byte_tokens(masked, "val") == "cd|"
    assert masked.masks == {
        "train": [0] * 3 + [1] * 4 + [1] * 6 + [0] * 2 + [1] * 3,
        "val": [1] * 3,
    }
    assert masked.text_bytes == {"train": 10, "val": 2}, (
        "masked text does not count for bits per byte"
    )
    assert masked.ends == {"train": [7, 13, 18], "val": [3]}
    plain = pack(task(*rows), tokenizer, ByPosition(9, 0))
    assert byte_tokens(plain, "train") == "yes|plain|abcd|"
    assert plain.masks == {"train": [], "val": []}
