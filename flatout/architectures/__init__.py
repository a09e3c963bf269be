"""Architectures of other programs: one file per family, with its config.json and its tensors.

A family states both directions, so that import and export use one table: from config.json to the
keys under `model.` and back, and from its tensors to flatout's and back. `table.py` has the rows of
such tables. Drop in a file that assigns ARCHITECTURE, and both find it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flatout.json_io import JsonObject

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor of a file, by name."""


@dataclass(frozen=True)
class TensorMap:
    """One tensor of a flatout model, and the tensors of the family that contain its values."""

    name: str
    """Its name in the flatout model's state_dict."""
    foreign: tuple[str, ...]
    """The family's names, in the order in which `join` takes and `split` returns them."""
    join: Callable[[Sequence[Tensor]], Tensor]
    """Returns flatout's tensor, computed from the family's."""
    split: Callable[[Tensor], Sequence[Tensor]] | None
    """The inverse of `join`; None when the family cannot be exported."""


@dataclass(frozen=True)
class Architecture:
    """A family of models: how its files correspond to a flatout model."""

    model_types: tuple[str, ...]
    """Values of `model_type` in a config.json of this family; none when it has no such file."""
    keys: Callable[[JsonObject], JsonObject] | None
    """Returns the keys under `model.`, with kind and vocab_size, for a config.json; None when the
    family has no such file. Raises ConfigError when flatout's models cannot express it.
    """
    why_not: Callable[[Any], str | None]
    """Returns why no class of this family has the shape of a model's configuration, or None."""
    tensors: Callable[[Any], list[TensorMap]]
    """Returns the tensors of a model's configuration. Every tensor of the model occurs once."""
    document: Callable[[Any], JsonObject] | None = None
    """Returns the config.json of a model's configuration, for which `why_not` is None; None when
    the family is only imported.
    """
    prefix: str = ""
    """Start of the family's names that files of the bare model lack."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors without weights, such as masks."""
    heads: tuple[str, ...] = ("lm_head.weight",)
    """Names under which files may repeat the output head, such as that of a tied model."""
    recognise: Callable[[Shapes, JsonObject], JsonObject | None] = lambda _shapes, _others: None
    """Returns the keys under `model.` of a file without config.json, or None for another family.

    It gets the shapes of the file's tensors and its other values.
    """
