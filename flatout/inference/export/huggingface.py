"""An export for transformers: as one of its classes where the shape fits, else as flatout's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch

from flatout.config.registry import ARCHITECTURES, MODELS
from flatout.errors import ConfigError
from flatout.inference.export import modeling
from flatout.inference.export.shards import Planned, write_shards
from flatout.inference.export.source import GENERATION, Source
from flatout.inference.export.tokenizer_files import TOKENIZER_CLASS, write_tokenizer
from flatout.models.families.exported import MODEL_TYPE
from flatout.models.families.table import SAME, Architecture, TensorMap
from flatout.models.transformer import TransformerConfig
from flatout.progress import Progress
from flatout.storage.files import copy_whole
from flatout.storage.json_io import JsonObject, write_json

MODELING = "modeling_flatout"
"""The name of the modeling file in an export."""
OWN_CLASS = "FlatoutForCausalLM"
"""The class in that file."""
TRAINING_KEYS = ("chunk_size", "dropout", "initialisation", "memory", "z_loss")
"""Keys under `model.` that have no effect on a trained model's results."""


@dataclass(frozen=True)
class Written:
    """What an export contains."""

    model_class: str | None
    """The class of transformers. None for an export in flatout's own names."""
    needs_code: bool = False
    """Whether the class is in a modeling file of the export."""
    tokenizer_class: str = "AutoTokenizer"
    """The class of transformers that loads the tokenizer with the ids of the run."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, as sentences."""


def write_huggingface(source: Source, folder: Path, max_bytes: int, progress: Progress) -> Written:
    """Write weights, config, tokenizer and generation settings for transformers.

    Raises: ConfigError for a model of the user's own code; CheckpointError.
    """
    family, reasons = stock_family(source)
    if family is not None:
        config = family.document(source.model)
        tensors = family.tensors(source.model)
        found = Written(str(config["architectures"][0]))
    else:
        config = own_config(source) | {
            "architectures": [OWN_CLASS],
            "auto_map": {
                "AutoConfig": f"{MODELING}.FlatoutConfig",
                "AutoModelForCausalLM": f"{MODELING}.{OWN_CLASS}",
            },
        }
        tensors = own_names(source)
        copy_whole(_wrapper(source), folder / f"{MODELING}.py")
        found = Written(OWN_CLASS, needs_code=True, notes=[no_stock_class(reasons)])
    dtypes = filter(
        lambda dtype: dtype.is_floating_point, map(source.dtype_of, source.weights.shapes)
    )
    name = str(max(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    tokenizer = source.tokenizer
    named = (tokenizer.named.get(f"{kind}_token") for kind in ("bos", "eos", "pad"))
    bos, eos, pad = (tokenizer.vocabulary[name or tokenizer.end_of_text] for name in named)
    shared: JsonObject = {"bos_token_id": bos, "eos_token_id": eos}
    write_json(folder / "config.json", config | {"dtype": name} | shared)
    stops = list(dict.fromkeys([eos, *source.stop_ids]))
    shared |= {"pad_token_id": pad} | ({"eos_token_id": stops} if len(stops) > 1 else {})
    write_json(folder / GENERATION, shared | ({"use_cache": False} if found.needs_code else {}))
    template = source.template.text if source.template else None
    max_tokens = getattr(source.model, "max_seq_len", None)
    found.notes.extend(write_tokenizer(tokenizer, folder, max_tokens, template))
    if config["model_type"] == "qwen2":
        found.notes.append(
            "AutoTokenizer of transformers 5 gives a qwen2 model the tokenizer of the published "
            f"ones: if the run's is different, load it with {TOKENIZER_CLASS}.from_pretrained(DIR)."
        )
        found = replace(found, tokenizer_class=TOKENIZER_CLASS)
    write_shards(folder, list(planned(source, tensors)), max_bytes, progress)
    return found


def stock_family(source: Source) -> tuple[Architecture | None, dict[str, str]]:
    """Return the family of transformers' own classes that has the model's shape, if any.

    Returns: the family, and why each other one does not fit, by name.
    """
    reasons: dict[str, str] = {}
    for name in ARCHITECTURES.names():
        family: Architecture = ARCHITECTURES.get(name)
        if family.not_exported:
            continue
        reason = family.why_not(source.model)
        if reason is None:
            return family, reasons
        reasons[name] = reason
    return None, reasons


def no_stock_class(reasons: dict[str, str]) -> str:
    """Return the sentences on why the export has a modeling file, and how to load it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    why = " ".join(f"{', '.join(each)}: {reason}" for reason, each in names.items())
    return (
        "No class of transformers has the shape of this model, so the export contains "
        f"{MODELING}.py, which wraps flatout's own: load it with trust_remote_code=True where "
        f"flatout is installed. {why}".rstrip()
    )


def own_names(source: Source) -> list[TensorMap]:
    """Return every weight under its own name."""
    return [TensorMap(name, (name,), *SAME) for name in source.weights.shapes]


def planned(source: Source, tensors: Iterable[TensorMap]) -> Iterator[Planned]:
    """Yield the tensors of an export, each computed from one of flatout's when it is written."""
    read = lru_cache(maxsize=1)(source.weights.read)  # the parts of a weight are read in succession
    for each in tensors:
        split = each.split
        assert split is not None, f"{each.name} of a family that can be exported"
        parts = split(torch.empty(source.weights.shapes[each.name], device="meta"))
        for index, (name, part) in enumerate(zip(each.foreign, parts, strict=True)):
            yield Planned(
                name,
                source.dtype_of(each.name),
                tuple(part.shape),
                lambda own=each.name, split=split, index=index: source.converted(  # type: ignore[misc]
                    own, split(read(own))[index]
                ),
            )


def own_config(source: Source) -> JsonObject:
    """Return the config.json of a model in flatout's own names. `model` has every key of it."""
    stated = source.model.model_dump(mode="json", exclude=set(TRAINING_KEYS))
    keys = {"kind": source.config.model.kind} | stated
    shape: JsonObject = {}
    if isinstance(source.model, TransformerConfig):
        keys |= {"d_ff": source.model.mlp_width, "max_seq_len": source.model.num_positions}
        shape = {"num_attention_heads": source.model.num_heads}
    shape |= {
        name: keys[key]
        for name, key in {"num_hidden_layers": "num_layers", "hidden_size": "d_model"}.items()
        if key in keys
    }
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": source.model.vocab_size,
        **shape,
        "tie_word_embeddings": False,
        "model": keys,
    }


def _wrapper(source: Source) -> Path:
    """Return the class of transformers that wraps a model of flatout.

    Raises: ConfigError when the model is the user's own code.
    """
    kind = source.config.model.kind
    if kind not in MODELS.names():
        raise ConfigError(
            f"The model {kind!r} cannot be exported for transformers: its code is not a part of "
            "flatout.",
            fix="Export its weights under their own names with --to safetensors.",
        )
    return Path(str(modeling.__file__)).with_name("wrapper.py")
