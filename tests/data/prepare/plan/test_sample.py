import random
from itertools import pairwise

import pytest
from read_tasks import BAD, tasks_of

from flatout.data.prepare.pack.work_items import hash_fraction
from flatout.data.prepare.plan import sample
from flatout.data.prepare.plan.sample import sample_texts, texts_by_hash
from flatout.data.sources import LeftOut, ReadTask, file_reading, files


def draw_texts(seed, count=300, longest=400):
    draw = random.Random(seed)
    return [
        f"{number} " + "".join(draw.choices("ab \n", k=draw.randrange(longest)))
        for number in range(count)
    ]


def test_a_sample_without_limit_is_the_corpus():
    corpus = tasks_of(3, ["", BAD, "x", LeftOut("dull", "y")], ["z"])
    wanted = ["document 0", "document 1", "document 2", "x", "z"]
    assert list(sample_texts(corpus, None)) == wanted
    assert list(sample_texts(corpus, 10**6)) == wanted
    assert sorted(texts_by_hash(corpus, 10**6)) == sorted(wanted)


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


@pytest.mark.parametrize("choose", [sample_texts, texts_by_hash])
@pytest.mark.parametrize("held", [True, False])
def test_a_bounded_sample_is_spread_over_one_long_text(tmp_path, monkeypatch, choose, held):
    monkeypatch.setattr(file_reading, "LONG_BYTES", 1 << 30 if held else 4)
    text = "".join(chr(0x100 + place // 1000) for place in range(100_000))
    (tmp_path / "a.txt").write_text(text)
    (found,) = choose(files.files(str(tmp_path)), 8000)
    assert 7900 < len(found) < 8100
    assert (found[0], found[-1]) == (text[0], text[-1])
    assert len(set(found)) >= 9


@pytest.mark.parametrize("limit", [4_000, 5_000, 20_000, 10**6])
def test_documents_are_chosen_by_hash_regardless_of_order_and_tasks(limit):
    texts = draw_texts(0)
    wanted = list(texts_by_hash(tasks_of(texts), limit))
    for seed in range(5):
        draw = random.Random(seed)
        draw.shuffle(texts)
        cuts = sorted(draw.sample(range(1, len(texts)), 7))
        groups = [
            texts[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(texts)], strict=True)
        ]
        assert list(texts_by_hash(tasks_of(*groups), limit)) == wanted


def test_the_documents_with_the_lowest_hashes_are_chosen_whole():
    texts = draw_texts(1)
    chosen = list(texts_by_hash(tasks_of(texts), 10_000))
    bound = max(map(hash_fraction, chosen))
    assert sorted(chosen) == sorted(text for text in texts if hash_fraction(text) <= bound)
    assert 10_000 <= sum(map(len, chosen)) < 10_400


def test_a_document_stays_chosen_when_others_are_added_or_removed():
    texts = draw_texts(2)
    more = draw_texts(3, count=30)
    before, after = (set(texts_by_hash(tasks_of(group), 10_000)) for group in (texts, texts + more))
    assert len(before & after) > 0.7 * len(before)


def test_one_huge_document_does_not_displace_the_others():
    small = draw_texts(4, count=30)
    total = sum(map(len, small))
    chosen = list(texts_by_hash(tasks_of(["huge " * 100_000, *small]), 2 * total))
    assert set(small) < set(chosen)
    assert abs(sum(map(len, chosen)) - 2 * total) < 20


def test_long_documents_get_equal_shares():
    chosen = list(texts_by_hash(tasks_of([letter * 10_000 for letter in "abcdefghijkl"]), 8_000))
    assert len(chosen) == 8
    assert {len(text) for text in chosen} <= set(range(990, 1_012))


@pytest.mark.parametrize("texts", [["a"], ["a" * 1000], ["a", "b" * 1000], ["a" * 50] * 9])
@pytest.mark.parametrize("limit", [1, 10, 10_000])
def test_a_sample_is_never_empty(texts, limit):
    assert any(texts_by_hash(tasks_of(texts), limit))
    assert list(texts_by_hash(tasks_of([""]), limit)) == []


def test_a_bounded_amount_is_read_from_all_over_the_corpus(monkeypatch):
    monkeypatch.setattr(sample, "READ_PER_BYTE", 4)
    seen = []

    def one(number):
        seen.append(number)
        yield f"{number:<100}"

    corpus = [ReadTask(one, (number,), "x") for number in range(1000)]
    chosen = list(texts_by_hash(corpus, 2_000))
    assert len(chosen) == 20
    assert 80 <= len(seen) <= 82
    assert max(seen) - min(seen) > 900
    assert sum(later < earlier for earlier, later in pairwise(seen)) > 20
    assert list(texts_by_hash(corpus, 2_000)) == chosen
