"""A family's two-way table, and its rows: entries of config.json, and tensors.

A field reads entries of config.json into keys under `model.`, and writes them again. A row of
tensors has the name of a tensor in flatout's model, and the family's, after the transform between
their values if they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatout.config.registry import MODELS
from flatout.errors import ConfigError
from flatout.models.transformer import TransformerConfig
from flatout.ops import Ops
from flatout.storage.json_io import JsonObject

OTHER_MODEL = "Start from a different model. docs/base-models.md lists those that flatout reads."
RESOLVED = {
    "d_ff": "mlp_width",
    "head_dim": "head_size",
    "max_seq_len": "num_positions",
    "num_kv_heads": "kv_heads",
    "qkv_bias": "has_qkv_bias",
}
"""Keys that may be None, and the properties of a `TransformerConfig` with their values."""
LINEAR = {"rotary_factor": "factor"}
SCALINGS = {
    "default": {},
    "linear": LINEAR,
    "llama3": LINEAR
    | {
        "rotary_low_factor": "low_freq_factor",
        "rotary_high_factor": "high_freq_factor",
        "rotary_original_len": "original_max_position_embeddings",
    },
}
"""The scalings of rotary positions: their keys under `model.` and in config.json."""
OPTIONAL = (
    "d_ff",
    "tied_head",
    "bias",
    "qkv_bias",
    "head_dim",
    "num_kv_heads",
    "parallel_residual",
    "rotary_dims",
    "qk_norm",
    "window",
    "full_attention_every",
    "logit_scale",
    "logit_softcap",
)
"""Keys of a shape that some families have no entry for: their models have the defaults."""


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
    """The inverse of `join`. None when the family cannot be exported."""


@dataclass(frozen=True)
class Field:
    """Entries of config.json and the keys under `model.` that have their values."""

    read: Callable[[JsonObject, JsonObject], JsonObject]
    """Returns the keys for a config.json and the keys of the fields before."""
    write: Callable[[Any], JsonObject] = lambda _config: {}
    """Returns the entries for a model's configuration."""


@dataclass(frozen=True)
class Architecture:
    """A family of models: how its files correspond to a flatout model."""

    tensors: Callable[[Any], list[TensorMap]]
    """Returns the tensors of a model's configuration. Every tensor of the model occurs once."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """The classes of transformers by the `model_type` of a config.json. Empty if the family has no
    such file.
    """
    fields: Sequence[Field] = ()
    """The entries of config.json and the keys under `model.`, in the order of a written file."""
    states: JsonObject = field(default_factory=dict)
    """Keys under `model.` that every model of the family has, with their values."""
    pads_biases: bool = False
    """Whether a model without biases is exported with biases of 0."""
    kind_of: Callable[[Any], str] | None = None
    """Returns the `model_type` of the class that has a shape, if there are several."""
    not_exported: str = ""
    """Why flatout only reads the family."""
    prefix: str = ""
    """Start of the family's names that files of the bare model lack."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors without weights, such as masks."""
    heads: tuple[str, ...] = ("lm_head.weight",)
    """Names under which files may repeat the output head, such as that of a tied model."""
    recognise: Callable[[Shapes, JsonObject], JsonObject | None] = lambda _shapes, _others: None
    """Returns the `model.` keys of a file without config.json, or None for a different family.

    It gets the shapes of the file's tensors and its other values.
    """

    def keys(self, document: JsonObject) -> JsonObject:
        """Return the keys under `model.`, with kind and vocab_size, for a config.json.

        Raises: ConfigError when an entry is missing, or flatout's models cannot express it.
        """
        keys = {"kind": "transformer"} | self.states
        for each in self.fields:
            keys |= each.read(document, keys)
        return keys

    def why_not(self, config: Any) -> str | None:
        """Return why no class of this family has the shape of a model's configuration, or None."""
        if self.not_exported:
            return self.not_exported
        if not isinstance(config, TransformerConfig):
            return "It is not a transformer."
        for key, value in self.states.items():
            if (stated := getattr(config, key)) != value:
                return f"model.{key} is {stated}, but this family has {value}."
        document = self.document(config)
        name = document["architectures"][0]
        try:
            keys = self.keys(document)
            del keys["kind"]
            back = TransformerConfig.model_validate(keys)
        except ConfigError as error:
            return f"{name} cannot have this shape: {error.what}"
        if self.pads_biases and not (config.bias or config.has_qkv_bias):
            back = back.model_copy(update={"bias": False})
        for key in (*keys, *OPTIONAL):
            stated, value = resolved(config, key), resolved(back, key)
            if stated != value:
                return f"model.{key} is {stated}, but {name} would have {value}."
        return None

    def document(self, config: Any) -> JsonObject:
        """Return the config.json of a model's configuration, for which `why_not` is None."""
        kind = self.kind_of(config) if self.kind_of else next(iter(self.classes))
        entries = {"architectures": [self.classes[kind]], "model_type": kind}
        for each in self.fields:
            entries |= each.write(config)
        return entries


def resolved(config: TransformerConfig, key: str) -> Any:
    """Return the value of a key, or the one that None stands for."""
    if key == "rotary_dims":
        return config.positions == "rotary" and (config.rotary_dims or config.head_size)
    return getattr(config, RESOLVED.get(key, key))


NUMBER = (int, float)
_KINDS = {int: "a whole number", NUMBER: "a number", bool: "true or false", dict: "a mapping"}


def required(document: JsonObject, key: str, kind: type | tuple[type, ...] = int) -> Any:
    """Return the value of a key.

    Raises: ConfigError when config.json lacks it, or its value has a different type.
    """
    value = document.get(key)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(
            f"The base model's configuration sets {key}={value!r}, which is not {_KINDS[kind]}."
            if key in document
            else f"The base model's configuration has no {key}.",
            fix="Restore the model's files from where it was published.",
        )
    return value


def require(document: JsonObject, key: str, *values: Any) -> None:
    """Check that a key is absent or has one of these values.

    Raises: ConfigError: flatout's model would compute a different function.
    """
    value = document.get(key)
    if value is not None and value not in values:
        raise ConfigError(
            f"The base model has {key}={value!r} in its configuration. flatout reads "
            f"{' or '.join(map(repr, values))}.",
            fix=OTHER_MODEL,
        )


def entry(theirs: str, ours: str, default: Any = None, names: JsonObject | None = None) -> Field:
    """Return the field of one entry: an integer, or one that may be absent if it has a default.

    `default` may be a function of config.json and the keys so far. `names` has the values under
    `model.` by those of config.json. Of two names, the first is written.
    """

    def read(document: JsonObject, keys: JsonObject) -> JsonObject:
        if default is not None and document.get(theirs) is None:
            value = default(document, keys) if callable(default) else default
        elif names:
            require(document, theirs, *names)
            value = document[theirs]
        else:
            kind = type(default) if isinstance(default, bool | float) else int
            value = required(document, theirs, NUMBER if kind is float else kind)
            value = float(value) if kind is float else value
        return {ours: names[value] if names else value}

    def write(config: Any) -> JsonObject:
        value = resolved(config, ours)
        if names:
            value = next((name for name, own in names.items() if own == value), None)
        return {theirs: value}

    return Field(read, write)


def sizes(names: str) -> list[Field]:
    """Return the fields of integers that a config.json must have: `THEIRS=OURS`, or one name."""
    pairs = (name.partition("=") for name in names.split())
    return [entry(theirs, ours or theirs) for theirs, _, ours in pairs]


def only(theirs: str, *values: Any, written: bool = True, **ours: Any) -> Field:
    """Return the field of an entry that is absent or has one of `values`. The first is written.

    `ours` are the keys that it means.
    """

    def read(document: JsonObject, _keys: JsonObject) -> JsonObject:
        require(document, theirs, *values)
        return ours

    return Field(read, lambda _config: {theirs: values[0]} if written else {})


def rotary_entries(document: JsonObject) -> tuple[str, JsonObject]:
    """Return the mapping of rotary positions in config.json, and its name.

    Raises: ConfigError when it is not a mapping, or there are two that differ.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if document.get(name)]
    found = [required(document, name, dict) for name in names]
    if len(found) == 2 and found[0] != found[1]:
        raise ConfigError(
            f"config.json of the base model has rope_parameters={found[0]} and "
            f"rope_scaling={found[1]}, which differ.",
            fix="Keep the one that the model was trained with.",
        )
    return (names[0], found[0]) if found else ("rope_scaling", {})


def rotary(base: str = "rope_theta") -> Field:
    """Return the field of rotary positions. `base` is the entry of the longest wavelength.

    transformers 5 writes one mapping, `rope_parameters`. Earlier versions `base` and
    `rope_scaling`. The field raises ConfigError for a scaling that flatout does not compute.
    """

    def read(document: JsonObject, keys: JsonObject) -> JsonObject:
        name, scaling = rotary_entries(document)
        stated = scaling.get("rope_type") or scaling.get("type")
        kind = stated or "default"
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise ConfigError(
                f"The base model scales rotary positions by {kind!r}. flatout computes linear "
                "and llama3.",
                fix=OTHER_MODEL,
            )
        used = {"rope_type", "type", "rope_theta", *SCALINGS["llama3"].values()}
        used -= {"factor"} if kind == "default" else set()
        used |= {"partial_rotary_factor"} if "rotary_dims" in keys else set()
        entries = {"partial_rotary_factor": document.get("partial_rotary_factor")} | scaling
        for one, value in entries.items():
            if one not in used and value not in (None, 1):
                raise ConfigError(
                    f"config.json of the base model has {one}={value!r} for rotary positions "
                    + (f"of the type {kind!r}." if stated else "without a rope_type."),
                    fix="Restore config.json from the model's repository. If it says the same "
                    "there, start from a different model: flatout cannot compute these positions.",
                )
        places = ({"rope_theta": document.get(base)}, document, scaling)
        thetas = {k: v for one in places for k, v in one.items() if v is not None}
        if "rope_theta" not in thetas:  # for llama3, 10,000 in transformers 4, 500,000 in 5
            thetas = {} if kind == "llama3" else {"rope_theta": 10_000}
        theta = required(thetas, "rope_theta", NUMBER)
        found = {"positions": "rotary", "rotary_base": float(theta)}
        for key, one in SCALINGS[kind].items():
            inside = {f"{name}.{one}": value for one, value in scaling.items()}
            found[key] = required(inside, f"{name}.{one}", NUMBER)
        return found if kind == "default" else found | {"rotary_scaling": kind}

    def write(config: Any) -> JsonObject:
        kind, scaling = config.rotary_scaling, None
        if kind != "none":
            stated = {name: getattr(config, key) for key, name in SCALINGS[kind].items()}
            scaling = {"rope_type": kind} | stated
        return {base: config.rotary_base, "rope_scaling": scaling}

    return Field(read, write)


SAME = (lambda parts: parts[0], lambda whole: [whole])
TRANSFORMS = {"transposed": (lambda parts: parts[0].t(), lambda whole: [whole.t()])}
"""The family stores the axes of a matrix in the opposite order."""


def stacked(*rows: int) -> tuple[Any, Any]:
    """Return the transform of a tensor that stacks the family's, which have this many rows."""
    return lambda parts: torch.cat(list(parts)), lambda whole: torch.split(whole, [*rows])


def tensors_of(rows: str, **transforms: Any) -> Callable[[Any], list[TensorMap]]:
    """Return a function from a configuration to the tensors of its model, from a table.

    A row has a name in flatout's model, a transform if the values differ, and the family's names.
    `{}` is the number of a block: the row is repeated for each. Rows of tensors that the model
    lacks are omitted. A transform is the two functions of a TensorMap, or returns them for a
    configuration. `*` stands for the weight and the bias of a layer: if the model has no bias, the
    family's is 0, with a number per row of the weight.
    """
    table = [line.split() for line in rows.splitlines() if line]

    def tensors(config: Any) -> list[TensorMap]:
        there, found = names_of(config), []
        for block in (None, *range(config.num_layers)):
            for ours, *theirs in table:
                if ("{}" in ours) == (block is not None):
                    transform = (TRANSFORMS | transforms).get(theirs[0])
                    names = [
                        name.format(block) for name in (ours, *theirs[transform is not None :])
                    ]
                    found += _maps(names, transform or SAME, config, there)
        return found

    return tensors


def _maps(names: list[str], transform: Any, config: Any, there: Collection[str]) -> list[TensorMap]:
    """Return the tensors of one row. The first name is flatout's."""
    join, split = transform(config) if callable(transform) else transform
    weight, bias = ([name.replace("*", part) for name in names] for part in ("weight", "bias"))
    if weight == bias or bias[0] in there:
        both = [weight] if weight == bias else [weight, bias]
        return [TensorMap(name, (*theirs,), join, split) for name, *theirs in both if name in there]

    def split_both(whole: Tensor) -> list[Tensor]:
        return [*split(whole), whole.new_zeros(len(whole))]

    return [TensorMap(weight[0], (weight[1], bias[1]), lambda parts: join(parts[:1]), split_both)]


def names_of(config: Any) -> list[str]:
    """Return the names of the tensors of flatout's model with this configuration."""
    classes = (MODELS.get(name) for name in MODELS.names())
    model_class = next(found for found in classes if isinstance(config, found.Config))
    return [*model_class.on_meta(config, Ops.plain()).state_dict()]
