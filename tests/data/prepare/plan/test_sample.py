import pytest
from read_tasks import BAD, tasks_of

from flatout.data.prepare.plan.sample import sample_texts
from flatout.data.sources import LeftOut


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
