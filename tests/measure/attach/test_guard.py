"""What is replaced in torch and Python looks, and is pickled, as the plain function."""

from __future__ import annotations

import pickle
import random

import pytest
import torch

from flatout.measure.attach.guard import replaced


@pytest.mark.parametrize(
    ("owner", "name"), [(torch, "save"), (torch, "set_num_threads"), (random, "seed")]
)
def test_a_replaced_function_reaches_another_process_as_the_plain_one(owner, name):
    """As the function of a process pool, which pickles it."""
    with replaced(owner, name, lambda plain: lambda *args: plain(*args)):
        ours = getattr(owner, name)
        text = pickle.dumps(ours)
        assert ours.__name__ == name
    assert pickle.loads(text) == getattr(owner, name) != ours
