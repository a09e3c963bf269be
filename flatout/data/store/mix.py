"""Reads several datasets as one, each with its share of the sequences, in closed form.

Datasets take turns in a repeating period: weights 3 and 1 give a period of four turns, three for
the first dataset and one for the second. The quota method orders the turns so that at every point
of the run each dataset is less than one sequence from its share. Position n belongs to turn
n mod period. Each dataset keeps its own permutation and epochs, so it is read in the same order as
it would be alone, and a position is still one integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from flatout.data.store.manifest import TOKENIZER, SplitName
from flatout.data.store.shards import Dataset, Split
from flatout.errors import ConfigError, DataError, in_shell
from flatout.storage.files import Array
from flatout.storage.json_io import JsonObject
from flatout.storage.process_limits import allow_open_files

if TYPE_CHECKING:
    from flatout.config.sections import DataConfig
    from flatout.data.tokenizers import Tokenizer

LONGEST_PERIOD = 65_536
"""A ratio that needs a longer period is rounded to this one. The smallest share is 1 turn in it."""


@dataclass(frozen=True)
class Member:
    """One of several datasets, and its share of the sequences."""

    name: str
    """The last parts of its path, as many as distinguish it from the others."""
    dataset: Dataset
    share: float
    """Its weight. Those of a mix add up to 1."""


class MixedDataset:
    """Several datasets with the same tokenizer, opened as one."""

    def __init__(self, members: Sequence[Member], turns: Sequence[int]) -> None:
        self.members = tuple(members)
        self._turns = tuple(turns)

    @classmethod
    def open(cls, mix: Mapping[str, float]) -> Self:
        """Open the directories of a mix, each with its weight.

        Raises: ConfigError when a dataset is named twice or its share is too small; DataError when
                one is not a dataset, or two have different tokenizers.
        """
        turns = whole_turns(mix)
        datasets = [Dataset.open(one) for one in mix]
        first = datasets[0]
        for other in datasets:
            mine, theirs = first.manifest, other.manifest
            if (mine.tokenizer.digest, mine.vocab_size) != (
                theirs.tokenizer.digest,
                theirs.vocab_size,
            ):
                raise DataError(
                    f"{first.path} and {other.path} were prepared with different tokenizers, "
                    f"{mine.tokenizer.name} of {mine.vocab_size:,} tokens and "
                    f"{theirs.tokenizer.name} of {theirs.vocab_size:,}: one model cannot read "
                    "both.",
                    fix="Prepare the second again with the tokenizer of the first: "
                    f"--tokenizer {in_shell(first.path / TOKENIZER)}.",
                )
        shares = [turn / sum(turns) for turn in turns]
        return cls(named_members(datasets, shares, "data.mix"), turns)

    @property
    def vocab_size(self) -> int:
        """Number of token ids. Every id is below it."""
        return self.members[0].dataset.vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all datasets."""
        return self.members[0].dataset.tokenizer

    def split(self, name: SplitName) -> MixedSplit:
        """Return `train` or `val` of all datasets, in their shares."""
        splits = [member.dataset.split(name) for member in self.members]
        return MixedSplit(name, splits, self._turns)


class MixedSplit:
    """One split of several datasets, whose sequence indices are numbered consecutively."""

    def __init__(self, name: SplitName, splits: Sequence[Split], turns: Sequence[int]) -> None:
        self.name: str = name
        self.num_tokens = sum(split.num_tokens for split in splits)
        self.has_mask = any(split.has_mask for split in splits)
        self.dtype = splits[0].dtype
        self._splits = tuple(splits)
        self._turns = np.asarray(turns, np.int64)
        self._split_of_turn = deal_turns(tuple(turns))
        self._earlier = np.zeros(len(self._split_of_turn), np.int64)
        """For each turn of the period, the number of earlier turns of the same dataset."""
        for number in range(len(splits)):
            self._earlier[self._split_of_turn == number] = np.arange(self._turns[number])

    def num_sequences(self, seq_len: int) -> int:
        """Return the number of whole sequences of seq_len + 1 tokens in all datasets.

        Raises: DataError when a dataset has no whole sequence, and so cannot have its share.
        """
        return int(self._first_sequences(seq_len)[-1])

    def sequences_at(self, positions: Array, seq_len: int, *, seed: int) -> Array:
        """Return the index of the sequence at each position of the endless order.

        Shapes:  positions (N,), integers from 0; returns (N,).
        """
        first = self._first_sequences(seq_len)
        periods, turn = np.divmod(np.asarray(positions, np.int64), len(self._split_of_turn))
        split_of = self._split_of_turn[turn]
        own_positions = periods * self._turns[split_of] + self._earlier[turn]
        sequences = np.empty(len(split_of), np.int64)
        for number, split in enumerate(self._splits):
            rows = np.flatnonzero(split_of == number)
            own = split.sequences_at(own_positions[rows], seq_len, seed=seed)
            sequences[rows] = first[number] + own
        return sequences

    def read_sequences(self, indices: Array, seq_len: int, out: Array) -> None:
        """Copy sequences into `out`.

        Shapes:  indices (N,), out (N, T + 1).
        """
        self._read(Split.read_sequences, indices, seq_len, out)

    def read_mask(self, indices: Array, seq_len: int, out: Array) -> None:
        """Write True where a sequence's target counts: everywhere, in a dataset without a mask.

        Shapes:  indices (N,), out (N, T) bool.
        """
        self._read(Split.read_mask, indices, seq_len, out)

    def read_document_ids(self, indices: Array, seq_len: int, out: Array) -> None:
        """Number the documents within each sequence's inputs, from 0 for the first.

        Shapes:  indices (N,), out (N, T) int32.
        """
        self._read(Split.read_document_ids, indices, seq_len, out)

    def locate(self, index: int, seq_len: int) -> JsonObject:
        """Return where a sequence is stored, as `Split.locate` does for its own dataset."""
        first = self._first_sequences(seq_len)
        number = int(np.searchsorted(first, index, side="right")) - 1
        return self._splits[number].locate(index - int(first[number]), seq_len)

    def _read(
        self,
        read: Callable[[Split, Array, int, Array], None],
        indices: Array,
        seq_len: int,
        out: Array,
    ) -> None:
        """Read the rows of `out` from the split that each index belongs to."""
        first = self._first_sequences(seq_len)
        split_of = np.searchsorted(first, indices, side="right") - 1
        for number in np.unique(split_of).tolist():
            split, rows = self._splits[number], np.flatnonzero(split_of == number)
            found = np.empty((len(rows), out.shape[1]), out.dtype)
            read(split, indices[rows] - first[number], seq_len, found)
            out[rows] = found

    def _first_sequences(self, seq_len: int) -> Array:
        """Return the index of each dataset's first sequence, followed by the total number."""
        for split in self._splits:
            if not split.num_sequences(seq_len):
                raise DataError(
                    f"{split.folder} has {split.num_tokens} tokens of {self.name}. "
                    f"One sequence of data.seq_len={seq_len} needs {seq_len + 1}.",
                    fix="Remove it from data.mix, set a smaller data.seq_len, "
                    "or prepare more text.",
                )
        return np.cumsum([0, *(split.num_sequences(seq_len) for split in self._splits)])


SplitReader = Split | MixedSplit
"""A split from which a data loader reads sequences."""


AnyDataset = Dataset | MixedDataset


def open_data(data: DataConfig) -> AnyDataset:
    """Open the dataset or mix that `data.path` or `data.mix` names.

    Raises: ConfigError when neither is set; DataError when there is no dataset.
    """
    allow_open_files()
    if data.mix is not None:
        return MixedDataset.open(data.mix)
    if data.path is not None:
        return Dataset.open(data.path)
    raise ConfigError(
        "data.path is not set: there is nothing to train on.",
        fix="Prepare text with `flatout prepare FILE --out data/mine`, "
        "then add data.path=data/mine.",
    )


def members_of(dataset: AnyDataset) -> tuple[Member, ...]:
    """Return the members of a mix. A single dataset is one member."""
    if isinstance(dataset, MixedDataset):
        return dataset.members
    return (Member(distinct_names([str(dataset.path)])[0], dataset, 1.0),)


def whole_turns(mix: Mapping[str, float]) -> tuple[int, ...]:
    """Return the weights as the smallest integers in the same ratio.

    A ratio whose period would exceed LONGEST_PERIOD is rounded.

    Raises: ConfigError naming the dataset whose share is below 1 in LONGEST_PERIOD.
    """
    exact = [Fraction(repr(float(weight))) for weight in mix.values()]
    total = sum(exact)
    least = min(exact)
    if least * LONGEST_PERIOD < total:
        name, weight = min(mix.items(), key=lambda item: item[1])
        # 1.006 keeps the weight sufficient after rounding to three digits.
        enough = 1.006 * float((total - least) / (LONGEST_PERIOD - 1))
        raise ConfigError(
            f"data.mix gives {name} the weight {weight:g} of {float(total):g}. "
            f"The smallest share is 1 sequence in {LONGEST_PERIOD:,}.",
            fix=f"Give it a weight of {enough:.3g} or more, or remove it.",
        )
    scale = math.lcm(*((weight / total).denominator for weight in exact))
    if scale > LONGEST_PERIOD:
        return tuple(round(weight / total * LONGEST_PERIOD) for weight in exact)
    return tuple(int(weight / total * scale) for weight in exact)


@cache
def deal_turns(turns: tuple[int, ...]) -> Array:
    """Return the dataset of each turn of the period. Dataset k has turns[k] of them.

    After every turn each dataset is less than one turn from its share.

    Shapes:  returns (sum of turns,).
    Cost:    O(period), half a second for the longest; once per process.
    Source:  the quota method, Balinski and Young 1975, "The quota method of apportionment".
    """
    due = np.asarray(turns, np.int64)
    period, dealt = int(due.sum()), np.zeros(len(due), np.int64)
    order = np.empty(period, np.int64)
    for turn in range(period):
        within_quota = dealt * period < (turn + 1) * due  # one more turn stays within the share
        order[turn] = np.argmin(np.where(within_quota, (dealt + 1) / due, np.inf))  # due first
        dealt[order[turn]] += 1
    order.flags.writeable = False  # the cached array is shared by all callers
    return order


def named_members(
    datasets: Sequence[Dataset], shares: Sequence[float], option: str
) -> list[Member]:
    """Return datasets that an option names, with their shares, as members of a mix.

    Raises: ConfigError when one is named twice.
    """
    folders = [dataset.path.resolve() for dataset in datasets]
    for dataset, folder in zip(datasets, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError(
                f"{option} names {dataset.path} twice.", fix="Name each dataset once."
            )
    names = distinct_names([str(dataset.path) for dataset in datasets])
    return [Member(*fields) for fields in zip(names, datasets, shares, strict=True)]


def distinct_names(paths_or_urls: Sequence[str]) -> list[str]:
    """Return the last part of each path or URL, or as many parts as distinguish them."""
    whole = [Path(path_or_url).absolute().parts for path_or_url in paths_or_urls]
    for depth in range(1, max(len(parts) for parts in whole) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return names
