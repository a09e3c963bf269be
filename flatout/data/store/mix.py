"""Several data sets read as one, each with its share of the windows, in closed form.

Turns are dealt out in a period that repeats: with weights 3 and 1 it has four turns, three of the
first set and one of the other. Within it the quota method puts every set's turns where no beginning
of the reading, however short, gives a set a window too many or too few. So position n belongs to
turn n mod period, and its set reads its own permutation on, by its own epochs: a set in a mix is
read in the same order as alone, and a position is still one integer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from flatout.data.store.manifest import SplitName
from flatout.data.store.remote import open_dataset
from flatout.data.store.shards import Dataset, Split
from flatout.errors import ConfigError, DataError, in_shell
from flatout.progress import SILENT, Progress

if TYPE_CHECKING:
    from flatout.config.schema import DataConfig
    from flatout.data.tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]

LONGEST_PERIOD = 65_536
"""Weights whose ratios need more turns than this are rounded to it: a share is then kept to 1 in
65,536, and none may be smaller.
"""


@dataclass(frozen=True)
class Member:
    """One data set and its share of the windows."""

    name: str
    """The end of its path, as much of it as tells it from the others."""
    dataset: Dataset
    share: float
    """Of 1."""


class MixedDataset:
    """Several data sets of one tokenizer, opened for reading as one."""

    def __init__(self, members: Sequence[Member], turns: Sequence[int]) -> None:
        self.members = tuple(members)
        self._turns = tuple(turns)
        self._splits: dict[str, MixedSplit] = {}

    @classmethod
    def open(cls, mix: Mapping[str, float], *, progress: Progress = SILENT) -> Self:
        """Open the folders or addresses of a mix, each with its weight.

        Raises: ConfigError when a set is named twice or its share is too small; DataError when one
                is no data set, or two have
        different tokenizers.
        """
        turns = whole_turns(mix)
        datasets = [open_dataset(place, progress=progress) for place in mix]
        for number, dataset in enumerate(datasets):
            _require_one_tokenizer(datasets[0], dataset)
            if dataset.path.resolve() in {other.path.resolve() for other in datasets[:number]}:
                raise ConfigError(
                    f"data.mix names {dataset.origin} twice.",
                    fix="Name it once, with the sum of its weights.",
                )
        names = distinct_names([dataset.origin for dataset in datasets])
        shares = [turn / sum(turns) for turn in turns]
        return cls([Member(*of_one) for of_one in zip(names, datasets, shares, strict=True)], turns)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.members[0].dataset.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all of them."""
        return self.members[0].dataset.tokenizer

    def split(self, name: SplitName) -> MixedSplit:
        """Return `train` or `val` of all sets, in their shares."""
        if name not in self._splits:
            self._splits[name] = MixedSplit(
                name, [part.dataset.split(name) for part in self.members], self._turns
            )
        return self._splits[name]


class MixedSplit:
    """One split of several data sets. Their windows are numbered through: those of the first set
    come first.
    """

    def __init__(self, name: SplitName, splits: Sequence[Split], turns: Sequence[int]) -> None:
        self.name: str = name
        self.num_tokens = sum(split.num_tokens for split in splits)
        self.has_mask = any(split.has_mask for split in splits)
        self.dtype = splits[0].dtype
        self._splits = tuple(splits)
        self._turns = np.asarray(turns, np.int64)
        self._set_at = deal(tuple(turns))
        self._earlier = np.zeros(len(self._set_at), np.int64)
        """At each turn of the period, how many earlier ones of it are the same set's."""
        for number in range(len(splits)):
            self._earlier[self._set_at == number] = np.arange(self._turns[number])

    def num_sequences(self, seq_len: int) -> int:
        """Return how many whole windows of seq_len + 1 tokens all sets have together.

        Raises: DataError when one has none: it cannot have its share.
        """
        return int(self._first_windows(seq_len)[-1])

    def sequences_at(self, positions: Array, seq_len: int, *, seed: int) -> Array:
        """Return the index of the window at each position of the endless reading: which set's turn
        it is, then where that set stands.

        Shapes:  positions (N,), integers from 0; returns (N,).
        """
        first = self._first_windows(seq_len)
        periods, turn = np.divmod(np.asarray(positions, np.int64), len(self._set_at))
        sets = self._set_at[turn]
        own_positions = periods * self._turns[sets] + self._earlier[turn]
        windows = np.empty(len(sets), np.int64)
        for number, split in enumerate(self._splits):
            rows = np.flatnonzero(sets == number)
            windows[rows] = first[number] + split.sequences_at(
                own_positions[rows], seq_len, seed=seed
            )
        return windows

    def read_sequences(self, indices: Array, seq_len: int, out: Array) -> None:
        """Copy windows into `out`.

        Shapes:  indices (N,), out (N, T + 1).
        """
        for split, rows, own in self._by_set(indices, seq_len):
            windows = np.empty((len(rows), out.shape[1]), split.dtype)
            split.read_sequences(own, seq_len, windows)
            out[rows] = windows

    def read_mask(self, indices: Array, seq_len: int, out: Array) -> None:
        """Write True where a window's target counts: everywhere, in a set without a mask.

        Shapes:  indices (N,), out (N, T) bool.
        """
        for split, rows, own in self._by_set(indices, seq_len):
            mask = np.ones((len(rows), out.shape[1]), np.bool_)
            if split.has_mask:
                split.read_mask(own, seq_len, mask)
            out[rows] = mask

    def read_document_ids(self, indices: Array, seq_len: int, out: Array) -> None:
        """Number the documents within each window's inputs: 0 for the one it begins in, then 1, 2,
        ...

        Shapes:  indices (N,), out (N, T) int32.
        """
        for split, rows, own in self._by_set(indices, seq_len):
            doc_ids = np.empty((len(rows), out.shape[1]), out.dtype)
            split.read_document_ids(own, seq_len, doc_ids)
            out[rows] = doc_ids

    def _first_windows(self, seq_len: int) -> Array:
        """Return the number of each set's first window, and one more: how many there are."""
        counts = [split.num_sequences(seq_len) for split in self._splits]
        for split, count in zip(self._splits, counts, strict=True):
            if not count:
                raise DataError(
                    f"{split.folder} holds {split.num_tokens} tokens of {self.name}; one window of data.seq_len={seq_len} needs {seq_len + 1}.",
                    fix="Leave it out of data.mix, set a smaller data.seq_len, or prepare more text.",
                )
        return np.cumsum([0, *counts])

    def _by_set(self, indices: Array, seq_len: int) -> list[tuple[Split, Array, Array]]:
        """Return each set that has one of the windows, with the places of its windows in `indices`
        and their own indices.
        """
        first = self._first_windows(seq_len)
        sets = np.searchsorted(first, indices, side="right") - 1
        rows = {number: np.flatnonzero(sets == number) for number in np.unique(sets).tolist()}
        return [
            (self._splits[number], of_set, indices[of_set] - first[number])
            for number, of_set in rows.items()
        ]


def open_data(data: DataConfig, *, progress: Progress = SILENT) -> Dataset | MixedDataset:
    """Open what `data.path` or `data.mix` names.

    Raises: ConfigError when neither is stated; DataError when there is no data set, or it cannot be
            fetched.
    """
    if data.mix is not None:
        return MixedDataset.open(data.mix, progress=progress)
    if data.path is not None:
        return open_dataset(data.path, progress=progress)
    raise ConfigError(
        "data.path is not set: there is nothing to train on.",
        fix="Prepare text with `flatout prepare FILE --out data/mine`, then add data.path=data/mine.",
    )


def members_of(dataset: Dataset | MixedDataset) -> tuple[Member, ...]:
    """Return the data sets of a mix; a single one is the special case, with all of the windows."""
    return (
        dataset.members
        if isinstance(dataset, MixedDataset)
        else (Member(distinct_names([dataset.origin])[0], dataset, 1.0),)
    )


def whole_turns(mix: Mapping[str, float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the ratio of the weights, or the nearest that add up to
    about LONGEST_PERIOD.

    Raises: ConfigError naming the set whose share is below 1 in LONGEST_PERIOD.
    """
    exact = [Fraction(repr(float(weight))) for weight in mix.values()]
    total = sum(exact)
    least = min(exact)
    if least * LONGEST_PERIOD < total:
        name, weight = min(mix.items(), key=lambda item: item[1])
        enough = 1.006 * float(
            (total - least) / (LONGEST_PERIOD - 1)
        )  # enough still when it is rounded to three digits
        raise ConfigError(
            f"data.mix gives {name} the weight {weight:g} of {float(total):g}; the smallest share is 1 window in {LONGEST_PERIOD:,}.",
            fix=f"Give it a weight of {enough:.3g} or more, or leave it out.",
        )
    scale = math.lcm(*((weight / total).denominator for weight in exact))
    if scale > LONGEST_PERIOD:
        return tuple(round(weight / total * LONGEST_PERIOD) for weight in exact)
    return tuple(int(weight / total * scale) for weight in exact)


@cache
def deal(turns: tuple[int, ...]) -> Array:
    """Return which set each turn of the period goes to: set k has turns[k] of them, at every moment
    less than one off its due share.

    Shapes:  returns (sum of turns,).
    Cost:    O(period), half a second for the longest; once a process.
    Source:  the quota method, Balinski and Young 1975, "The quota method of apportionment".
    """
    due = np.asarray(turns, np.int64)
    period, dealt = int(due.sum()), np.zeros(len(due), np.int64)
    order = np.empty(period, np.int64)
    for turn in range(period):
        in_time = dealt * period < (turn + 1) * due  # one more would not be too many
        order[turn] = np.argmin(
            np.where(in_time, (dealt + 1) / due, np.inf)
        )  # whose next one is due first
        dealt[order[turn]] += 1
    order.flags.writeable = False  # everybody who asks for these turns gets this array
    return order


def distinct_names(places: Sequence[str]) -> list[str]:
    """Return the last part of each path or address, or as many parts as it takes to tell them
    apart.
    """
    whole = [Path(place).absolute().parts for place in places]
    for depth in range(1, max(len(parts) for parts in whole) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return names


def _require_one_tokenizer(first: Dataset, other: Dataset) -> None:
    mine, theirs = first.manifest, other.manifest
    if (mine.tokenizer.digest, mine.vocab_size, mine.dtype) != (
        theirs.tokenizer.digest,
        theirs.vocab_size,
        theirs.dtype,
    ):
        raise DataError(
            f"{first.origin} and {other.origin} were prepared with different tokenizers, {mine.tokenizer.name} of {mine.vocab_size:,} tokens and "
            f"{theirs.tokenizer.name} of {theirs.vocab_size:,}: one model cannot read both.",
            fix=f"Prepare the second again with the first's: --tokenizer {in_shell(first.path / mine.tokenizer.file)}.",
        )
