import pytest

from flatout.data.prepare.pack import tokenize as stage
from flatout.data.prepare.pack.jobs import (
    ByHash,
    ByPosition,
    Job,
    Whole,
    cut_to_bytes,
    hash_fraction,
)
from flatout.data.prepare.pack.records import RangeRecord, count_skipped
from flatout.data.prepare.pack.tokenize import Packing, Tally
from flatout.data.store.manifest import SPLITS
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import DataError
from flatout.sources import FIRST_NAMED, BadRow, Document, LeftOut, ReadTask, RowLocation

BAD = BadRow("is bad", "Mend it.", "bad", "row 7")


def read(rows):
    return rows


def job(*rows, **limits):
    return Job(ReadTask(read, (list(rows),), "x", num_bytes=9), **limits)


class ListSink:
    """A sink that appends to lists."""

    def __init__(self):
        self.tokens, self.ends, self.masks = [], [], []
        self.text_bytes = self.calls = 0

    def append(self, tokens, ends, *, text_bytes, mask=None, marks=None):
        self.masks += [] if mask is None else mask.tolist()
        self.ends += (len(self.tokens) + ends).tolist()
        self.tokens += tokens.tolist()
        self.text_bytes += text_bytes
        self.calls += 1


class Packed:
    """The tokens of some jobs by split, and the rows left out."""

    def __init__(self, jobs, packing, report=lambda _: None):
        sinks = {name: ListSink() for name in SPLITS}
        self.record = RangeRecord(number=0, num_bytes=0)
        stage.pack(jobs, packing, sinks, self.record, report)
        for key in ("tokens", "ends", "masks", "text_bytes"):
            setattr(self, key, {name: getattr(sink, key) for name, sink in sinks.items()})
        self.calls = sum(sink.calls for sink in sinks.values())


def pack(job, tokenizer, assignment, on_bad_row):
    return Packed([job], Packing(tokenizer, assignment, on_bad_row))


def counts(packed):
    return {rows.reason: rows.count for rows in packed.record.skipped}


def byte_tokens(packed, name):
    """Return a split as text, with | for end-of-text."""
    return "".join("|" if token == 256 else chr(token) for token in packed.tokens[name])


@pytest.fixture
def tokenizer():
    return make_tokenizer("byte", lambda limit: ())


def test_only_end_of_text_is_added_after_each_document(tokenizer):
    packed = pack(job("ab", "c", "def"), tokenizer, ByPosition(2, 0), "raise")
    assert byte_tokens(packed, "train") == "ab|c|"
    assert byte_tokens(packed, "val") == "def|"
    assert packed.ends == {"train": [3, 5], "val": [4]}
    assert packed.text_bytes == {"train": 3, "val": 3}


def test_text_bytes_count_utf8(tokenizer):
    packed = pack(job("é🙂"), tokenizer, ByPosition(1, 0), "raise")
    assert packed.text_bytes["train"] == 6


def test_document_indices_continue_from_the_previous_job(tokenizer):
    packed = pack(job("ab", "c", first=9), tokenizer, ByPosition(10, 0), "raise")
    assert (byte_tokens(packed, "train"), byte_tokens(packed, "val")) == ("ab|", "c|")


def test_a_job_may_have_its_own_split(tokenizer):
    packed = pack(job("ab", "c", assignment=Whole("val")), tokenizer, Whole("train"), "raise")
    assert (byte_tokens(packed, "train"), byte_tokens(packed, "val")) == ("", "ab|c|")
    assert byte_tokens(pack(job("ab", "c"), tokenizer, Whole("train"), "raise"), "train") == "ab|c|"


def test_tail_cuts_a_document_by_characters(tokenizer):
    packed = pack(job("abcdé"), tokenizer, ByPosition(0, 3), "raise")
    assert byte_tokens(packed, "train") == "abc|"
    assert packed.tokens["val"] == [ord("d"), 0xC3, 0xA9, 256]


def test_the_hash_split_depends_on_the_text_alone(tokenizer):
    texts = [f"text {number}" for number in range(2000)]
    packed = pack(job(*texts), tokenizer, ByHash(0.1), "raise")
    val = byte_tokens(packed, "val").split("|")[:-1]
    assert val == [text for text in texts if hash_fraction(text) < 0.1]
    assert 140 < len(val) < 260
    again = pack(job(*reversed(texts), first=5), tokenizer, ByHash(0.1), "raise")
    assert byte_tokens(again, "val").split("|")[:-1] == val[::-1]


def test_the_hash_of_a_text_is_fixed():
    assert hash_fraction("flatout") == pytest.approx(0.7773977660767666, rel=1e-12)


def test_an_empty_job_packs_nothing(tokenizer):
    packed = pack(job(), tokenizer, ByHash(0.5), "raise")
    assert packed.calls == 0


def test_a_bad_row_raises_or_is_counted(tokenizer):
    with pytest.raises(DataError, match="row 7 is bad"):
        pack(job("a", BAD, "b"), tokenizer, ByPosition(9, 0), "raise")
    packed = pack(
        job("a", BAD, LeftOut("too dull", "row 8"), "b"), tokenizer, ByPosition(9, 0), "skip"
    )
    assert byte_tokens(packed, "train") == "a|b|"
    assert counts(packed) == {"bad": 1, "too dull": 1}
    assert [rows.first for rows in packed.record.skipped] == [
        (RowLocation("row 7"),),
        (RowLocation("row 8"),),
    ]
    assert packed.record.bad_rows == 1, "rows left out by a source are not bad"


def test_an_untokenisable_document_is_named_and_leaves_no_tokens():
    tokenizer = make_tokenizer("char", lambda limit: ["ab"])
    with pytest.raises(DataError, match=r"^book\.txt cannot be tokenised: Character 1, 'x'"):
        pack(job(Document("ax", "book.txt")), tokenizer, ByPosition(9, 0), "raise")
    packed = pack(job("a", "ax", "aaax", "b"), tokenizer, ByPosition(2, 2), "skip")
    assert packed.tokens == {"train": [0, 2], "val": [1, 2]}
    assert counts(packed) == {"cannot be tokenised": 2}


def test_a_job_stops_reading_at_its_limit(tokenizer):
    def endless():
        yield "a"
        yield BAD
        yield "bcd"
        raise AssertionError("read too far")

    limited = Job(ReadTask(endless, (), "x"), take=2, last_bytes=2)
    assert byte_tokens(pack(limited, tokenizer, ByPosition(9, 0), "skip"), "train") == "a|bc|"
    assert list(Job(ReadTask(endless, (), "x"), take=0).rows()) == []


def test_a_cut_document_keeps_its_prompt():
    (cut,) = job(Document("text", "x", 7, prompt="ask"), take=1, last_bytes=2).rows()
    assert cut == Document("te", "x", 7, prompt="ask")


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [("aé🙂", 7, "aé🙂"), ("aé🙂", 6, "aé"), ("aé🙂", 3, "aé"), ("aé🙂", 2, "a"), ("é", 1, "")],
)
def test_text_is_cut_between_characters(text, limit, kept):
    assert cut_to_bytes(text, limit) == kept


def test_the_first_skipped_rows_are_named_in_order():
    skipped = []
    for part in range(3):
        count_skipped(skipped, "bad", [RowLocation(f"{part}.{row}") for row in range(7)], 7)
    (entry,) = [rows.named() for rows in skipped]
    assert (entry.reason, entry.count) == ("bad", 21)
    assert entry.first == tuple(f"{row // 7}.{row % 7}" for row in range(FIRST_NAMED))


def test_held_tokens_are_bounded(tokenizer, monkeypatch):
    whole = pack(job("abc", "de", "f" * 9, "g"), tokenizer, ByPosition(9, 0), "raise")
    monkeypatch.setattr(stage, "HELD_TOKENS", 5)
    pieces = pack(job("abc", "de", "f" * 9, "g"), tokenizer, ByPosition(9, 0), "raise")
    assert (whole.calls, pieces.calls) == (1, 3)
    assert (pieces.tokens, pieces.ends, pieces.text_bytes) == (
        whole.tokens,
        whole.ends,
        whole.text_bytes,
    )


def test_progress_is_reported_per_job(tokenizer):
    reports = []
    Packed(
        [job("ab", "c"), job("def")],
        Packing(tokenizer, ByPosition(9, 0), "raise"),
        reports.append,
    )
    assert reports == [Tally(9, 2, 5), Tally(9, 1, 4)]


@pytest.mark.parametrize("held", [1, 1 << 20])
def test_prompts_are_packed_before_the_text_and_masked(tokenizer, monkeypatch, held):
    monkeypatch.setattr(stage, "HELD_TOKENS", held)
    rows = [
        Document("yes", "x", prompt="ok?"),
        Document("plain", "x"),
        Document("abcd", "x", prompt="é"),
    ]
    masked = Packed([job(*rows)], Packing(tokenizer, ByPosition(2, 2), "raise", "prompt"))
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
    plain = Packed([job(*rows)], Packing(tokenizer, ByPosition(9, 0), "raise"))
    assert byte_tokens(plain, "train") == "yes|plain|abcd|"
    assert plain.masks == {"train": [], "val": []}
