"""Items of a dataset that are kept are returned for their numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from flatout.measure.attach.items import Items


class Rows:
    """A dataset that counts its calls, and takes what NumPy takes."""

    def __init__(self):
        self.rows, self.calls = torch.arange(12.0).view(6, 2), 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.calls += 1
        return index if isinstance(index, str) else self.rows[index]


@pytest.mark.parametrize(
    ("index", "is_kept"),
    [(2, True), (np.int64(5), True), (-1, False), ([0, 3], False), (slice(2), False), ("a", False)],
)
def test_an_index_that_is_no_number_of_a_row_goes_to_the_dataset(index, is_kept):
    rows = Rows()
    kept = Items(rows, default_collate).keeping(Rows.__getitem__)
    rows.calls = 0
    found = kept(rows, index)
    assert (rows.calls == 0) is is_kept
    assert np.array_equal(found, Rows()[index])
