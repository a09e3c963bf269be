import hashlib
import itertools

import pytest

from flatout.data.sources import synthetic
from flatout.errors import DataError


def texts(**parameters):
    return [row.text for part in synthetic.synthetic(**parameters) for row in part.rows()]


def test_equal_parameters_give_equal_texts_and_others_do_not():
    assert texts(documents=20, seed=1) == texts(documents=20, seed=1)
    assert texts(documents=20, seed=1) != texts(documents=20, seed=2)
    assert texts(documents=30, seed=1)[:20] == texts(documents=20, seed=1)


def test_the_texts_never_change_silently():
    digest = hashlib.sha256("\n".join(texts(documents=5, words=30, seed=0)).encode()).hexdigest()
    assert digest == "0725ee4bed1a85ea3f5c15ecad6c400a14ff91dcca016ead2e5e2b7e24fe61be"


def test_the_tasks_together_yield_all_documents(monkeypatch):
    whole = texts(documents=25)
    monkeypatch.setattr(synthetic, "DOCUMENTS_PER_PART", 10)
    assert len(synthetic.synthetic(documents=25)) == 3
    assert texts(documents=25) == whole


def test_there_is_something_to_learn():
    words = " ".join(texts(documents=200)).lower().replace(".", "").split()
    followers = {}
    for word, after in itertools.pairwise(words):
        followers.setdefault(word, []).append(after)
    common = max(followers.values(), key=len)
    top = max(common.count(word) for word in set(common)) / len(common)
    assert top > 0.3


@pytest.mark.parametrize(
    "parameters",
    [
        {"documents": 0},
        {"words": 0},
        {"seed": -1},
        {"documents": "ten"},
        {"seed": 1.5},
        {"documents": True},
    ],
)
def test_parameters_that_are_not_counts_are_rejected(parameters):
    with pytest.raises(DataError, match=f"{next(iter(parameters))}="):
        synthetic.synthetic(**parameters)
