import random

import pytest
from read_tasks import BAD, tasks_of

from flatout.data.prepare.pack.work_items import (
    ALL_TRAIN,
    ALL_VAL,
    ByHash,
    ByPosition,
    hash_fraction,
)
from flatout.data.prepare.plan import make as stage
from flatout.data.prepare.plan.make import sample_texts
from flatout.data.prepare.request.inputs import Corpus
from flatout.data.prepare.request.options import Options, parse_rule
from flatout.data.sources import Document, LeftOut, ReadTask
from flatout.errors import DataError


def make_plan(tasks, validation=None, *, split=None, **options):
    """Return the work plan of a corpus of these read tasks."""
    held_out = None if validation is None else Corpus(("validation",), tuple(validation))
    return stage.make_plan(Corpus(("text",), tuple(tasks), split, held_out), Options(**options))


def texts(plan):
    return [
        row.text for task in plan.read_tasks for row in task.rows() if isinstance(row, Document)
    ]


@pytest.mark.parametrize(
    ("counts", "rule"),
    [((1, 2, 99), "tail 0.1"), ((100, 999), "hash 0.05"), ((1000, 5000), "hash 0.01")],
)
def test_the_default_rule_follows_the_number_of_documents(counts, rule):
    for count in counts:
        assert make_plan(tasks_of(count // 2, count - count // 2), split=None).rule == rule


def test_the_default_rule_never_leaves_validation_empty():
    same = [f"text {number}" for number in range(3000) if hash_fraction(f"text {number}") >= 0.05][
        :200
    ]
    assert make_plan(tasks_of(same), split=None).rule == "tail 0.1"


@pytest.mark.parametrize("length", [2, 9, 10, 11, 1000, 1_115_394])
def test_the_tail_of_one_document_begins_at_int_n_times_0_9(length):
    plan = make_plan(tasks_of(["é" * length]), split="tail 0.1")
    assert plan.items[0].assignment == ByPosition(0, int(length * 0.9))


@pytest.mark.parametrize(
    ("lengths", "place"),
    [
        ([50, 50], ByPosition(1, 40)),
        ([2_000, 1_100_000], ByPosition(1, int(1_102_000 * 0.9) - 2_000)),
        ([1_100_000, 2_000], ByPosition(0, int(1_102_000 * 0.9))),
        ([4, 4], ByPosition(1, 3)),
        ([1, 1], ByPosition(1, 0)),
        ([90, 10], ByPosition(1, 0)),
        ([899, 101], ByPosition(1, 0)),
        ([904, 96], ByPosition(1, 0)),
        ([890, 110], ByPosition(1, 10)),
        ([910, 90], ByPosition(0, 900)),
        ([10] * 10, ByPosition(9, 0)),
        ([10] * 11, ByPosition(9, 9)),
        ([10] * 100, ByPosition(90, 0)),
        ([10] * 1000, ByPosition(900, 0)),
        ([1] * 500 + [9_500], ByPosition(500, 8_500)),
    ],
)
def test_the_tail_of_several_documents_is_the_end_of_their_text(lengths, place):
    assert (
        make_plan(
            tasks_of([chr(0x100 + number) * length for number, length in enumerate(lengths)]),
            split="tail 0.1",
        )
        .items[0]
        .assignment
        == place
    )


@pytest.mark.parametrize("options", [{"chat": "plain"}, {"mask_field": "prompt"}])
@pytest.mark.parametrize(
    ("lengths", "first"), [([50, 50], 1), ([10] * 11, 9), ([9, 900], 1), ([900, 9], 1)]
)
def test_neither_a_conversation_nor_an_answer_to_a_prompt_is_cut(options, lengths, first):
    tasks = tasks_of(["x" * length for length in lengths])
    plan = make_plan(tasks, split="tail 0.1", **options)
    assert plan.items[0].assignment == ByPosition(first, 0)
    with pytest.raises(DataError, match=r"a single (row|conversation) cannot be split"):
        make_plan(tasks_of(["a text"]), split="tail 0.1", **options)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5, 0.9])
def test_the_tail_has_the_requested_share(seed, fraction):
    draw = random.Random(seed)
    texts = ["x" * int(draw.paretovariate(0.7) * 10) for _ in range(draw.choice([2, 5, 50, 400]))]
    place = make_plan(tasks_of(texts[:1], texts[1:]), split=f"tail {fraction}").items[0].assignment
    pieces = [
        piece
        for number, text in enumerate(texts)
        for piece in place.assign(Document(text, ""), number)
    ]
    assert all(text for _, text in pieces)
    assert len(pieces) <= len(texts) + 1
    total = sum(map(len, texts))
    share = sum(len(text) for name, text in pieces if name == "val") / total
    assert abs(share - fraction) <= 0.05 * fraction + 1.1 / total


@pytest.mark.parametrize(
    ("limits", "count"),
    [({}, 5), ({"max_documents": 3}, 3), ({"max_bytes": 15}, 2), ({"max_documents": 99}, 5)],
)
def test_separate_validation_text_is_taken_whole_and_comes_first(limits, count):
    plan = make_plan(tasks_of(2, 3), tasks_of(["v" * 100, "w"], ["x"]), **limits)
    assert plan.rule == "named"
    assert texts(plan)[:3] == ["v" * 100, "w", "x"]
    assert len(texts(plan)) == 3 + count
    assert [item.assignment for item in plan.items] == [ALL_VAL, ALL_TRAIN]
    assert [item.number for item in plan.items] == [0, 1]
    assert [len(item.read_tasks) for item in plan.items] == [2, len(plan.read_tasks) - 2]


def test_a_named_split_without_limits_is_planned_without_reading():
    def explode():
        raise AssertionError("read")

    plan = make_plan([ReadTask(explode, (), "x")], [ReadTask(explode, (), "y")])
    assert [task.fingerprint for task in plan.read_tasks] == ["y", "x"]


def test_document_indices_count_documents_only(monkeypatch):
    monkeypatch.setattr(stage, "range_bytes", lambda _: 1)
    plan = make_plan(
        tasks_of(3, ["", BAD, "x"], [LeftOut("dull", "y")], 2), split="tail 0.3", on_bad_row="skip"
    )
    assert [item.first for item in plan.items] == [0, 3, 4, 4]
    assert plan.items[0].assignment == ByPosition(4, 4)
    assert plan.take is None, "rows omitted at the end are still read"


def test_a_hash_rule_is_planned_without_reading():
    def explode():
        raise AssertionError("read")

    plan = make_plan([ReadTask(explode, (), "x")], split="hash 0.3")
    assert (plan.rule, plan.items[0].assignment) == ("hash 0.3", ByHash(0.3))


def test_the_survey_reads_no_more_than_it_needs():
    def endless():
        number = 0
        while True:
            yield f"text {number}"
            number += 1

    def explode():
        raise AssertionError("read")

    plan = make_plan([ReadTask(endless, (), "x"), ReadTask(explode, (), "y")], split=None)
    assert plan.rule == "hash 0.01"
    assert (plan.take, len(plan.read_tasks)) == (None, 2)
    limited = make_plan(
        [ReadTask(endless, (), "x"), ReadTask(explode, (), "y")], split="hash 0.1", max_documents=7
    )
    assert len(texts(limited)) == 7


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 99])
def test_documents_are_taken_in_order_up_to_the_limit(limit):
    plan = make_plan(tasks_of(2, 0, 3), split="hash 0.5", max_documents=limit)
    assert texts(plan) == [f"document {number}" for number in range(min(limit, 5))]


@pytest.mark.parametrize("limit", range(1, 14))
def test_text_is_taken_up_to_the_byte_limit(limit):
    plan = make_plan(tasks_of(["abc", "é"], ["defg", "hi"]), split="hash 0.5", max_bytes=limit)
    whole = b"".join(text.encode() for text in texts(plan))
    full = "abcédefghi".encode()
    assert whole == full[:limit] or (limit == 4 and whole == b"abc")


def test_the_tail_is_of_the_documents_within_the_limits():
    plan = make_plan(tasks_of(10), split="tail 0.5", max_documents=4, max_bytes=10_000)
    assert plan.items[0].assignment == ByPosition(2, 0)
    cut = make_plan(tasks_of(["x" * 100, "y"]), split="tail 0.5", max_bytes=50)
    assert cut.items[0].assignment == ByPosition(0, 25)
    assert texts(cut) == ["x" * 50]


@pytest.mark.parametrize("text", ["tail 0.1", "tail:0.1", "tail=0.1", " tail  1e-1 "])
def test_a_rule_has_several_spellings(text):
    assert parse_rule(text) == ("tail", 0.1)


def test_a_bad_row_is_raised_by_the_survey_unless_skipped():
    with pytest.raises(DataError, match="row is bad"):
        make_plan(tasks_of(["a", BAD]), split=None)
    assert make_plan(tasks_of(["a", BAD, "b"]), split=None, on_bad_row="skip").items[
        0
    ].assignment == ByPosition(1, 0)


def test_a_corpus_without_documents_has_a_plan():
    assert texts(make_plan(tasks_of([""]), split=None)) == []


def test_a_sample_without_limit_is_the_corpus():
    corpus = tasks_of(3, ["", BAD, "x", LeftOut("dull", "y")], ["z"])
    wanted = ["document 0", "document 1", "document 2", "x", "z"]
    assert list(sample_texts(corpus, None)) == wanted
    assert list(sample_texts(corpus, 10**6)) == wanted


def test_a_bounded_sample_is_spread_over_the_corpus():
    corpus = tasks_of(*[[chr(0x100 + part) * 10] * 100 for part in range(200)])
    found = list(sample_texts(corpus, 6400))
    size = sum(map(len, found))
    assert 6400 <= size <= 7100
    seen = sorted({ord(text[0]) - 0x100 for text in found})
    assert len(seen) == 64
    assert (seen[0], seen[-1]) == (0, 196)
    assert found == list(sample_texts(corpus, 6400))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_empty_tasks_leave_enough_of_a_sample(every):
    """A row longer than a read task leaves the tasks it extends into empty."""
    corpus = tasks_of(*[["x" * 12_000] if number % every == 0 else [] for number in range(45)])
    assert 4_000 < sum(map(len, sample_texts(corpus, 8_000))) < 8_800


def test_a_bounded_sample_is_spread_over_one_long_text():
    text = "".join(chr(0x100 + place // 1000) for place in range(100_000))
    (found,) = sample_texts(tasks_of([text]), 8000)
    assert 7900 < len(found) < 8100
    assert (found[0], found[-1]) == (text[0], text[-1])
    assert len(set(found)) >= 9


@pytest.mark.parametrize("texts", [["a"], ["a" * 1000], ["a", "b" * 1000], ["a" * 50] * 9])
@pytest.mark.parametrize("limit", [1, 10, 10_000])
def test_a_sample_is_never_empty(texts, limit):
    assert any(sample_texts(tasks_of(texts), limit))
    assert list(sample_texts(tasks_of([""]), limit)) == []


@pytest.mark.parametrize(
    ("corpus_mib", "range_mib"),
    [(0, 1), (64, 1), (640, 10), (4096, 64), (65_536, 64), (65_600, 128), (200_000, 256)],
)
def test_the_size_of_a_range_follows_from_the_corpus(corpus_mib, range_mib):
    assert stage.range_bytes([corpus_mib << 19] * 2) == range_mib << 20
