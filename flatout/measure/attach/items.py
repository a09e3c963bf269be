"""Reads the items of a dataset once, where they are the same at every call and fit into memory."""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

MOST_MEMORY = 0.25
"""Largest share of the free memory that kept items may take."""
MOST_S = 5.0
"""Longest time of reading all of them, before the first step."""


class NotKept(Exception):
    """Why items are not kept."""


class Items:
    """All items of a dataset, in memory.

    Raises: NotKept when they may differ from call to call, or do not fit, or take long.
    """

    def __init__(self, dataset: Any, collate: Any) -> None:
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        if isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitems__"):
            raise NotKept("The dataset is not read item by item.")
        if dataset is None:
            raise NotKept("The dataset is made anew in each epoch.")
        self.dataset = dataset
        # another function that makes batches may change the items
        self._given: Callable[[Any], Any] = copy.deepcopy
        if collate is default_collate:
            self._given = lambda item: item
        before = states()
        one, other = dataset[0], dataset[0]
        draws = pickle.dumps(before) != pickle.dumps(states())
        torch.set_rng_state(torch.from_numpy(before[0]))
        random.setstate(before[1])
        np.random.set_state(before[2])
        pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
        if draws or not all(np.array_equal(a, b) for a, b in pairs):
            raise NotKept("Its items differ from call to call.")
        end_s, free = time.perf_counter() + MOST_S, psutil.virtual_memory().available
        self._kept = list[Any]()
        while len(self._kept) < len(dataset):
            self._kept.append(dataset[len(self._kept)])
            if time.perf_counter() > end_s:
                raise NotKept(f"Reading its items takes more than {MOST_S:.0f} s.")
            if psutil.virtual_memory().available < (1 - MOST_MEMORY) * free:
                raise NotKept("Its items take too much memory.")

    def keeping(self, plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a `__getitem__` that returns the items which were read."""

        def get(dataset: Any, index: Any) -> Any:
            is_row = isinstance(index, (int, np.integer)) and 0 <= index < len(self._kept)
            is_kept = is_row and dataset is self.dataset
            return self._given(self._kept[index]) if is_kept else plain(dataset, index)

        return get


def states() -> tuple[Any, Any, Any]:
    """Return the states of the generators of torch, of Python and of NumPy."""
    return torch.random.get_rng_state().numpy(), random.getstate(), np.random.get_state()


def keeping_items(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of a DataLoader that reads all items, if it has no workers for that."""

    def construct(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        plain(loader, *args, **kwargs)
        if loader.num_workers:
            return
        try:
            items = Items(loader.dataset, loader.collate_fn)
        except Exception:  # whatever its items do: they are read as before
            return
        owner = type(items.dataset)
        owner.__getitem__ = items.keeping(owner.__getitem__)

    return construct
