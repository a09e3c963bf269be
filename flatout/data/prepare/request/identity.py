"""The identity of a dataset: the description of its text and options in the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from flatout.data.prepare.request.cards import load_card
from flatout.data.prepare.request.inputs import Corpus
from flatout.data.prepare.request.options import Options
from flatout.data.prepare.request.split_rule import NAMED, parse_rule
from flatout.data.tokenizers import kind_named, read_tokenizer, tokenizer_path
from flatout.errors import OutputInUse, without_secrets
from flatout.registry import DATASETS

DEFAULT_FIELD = "text"
"""The field of a row that contains its text, unless another is named."""


def describe(corpus: Corpus, options: Options) -> dict[str, Any]:
    """Return the manifest's description of the text and options.

    Equal descriptions, apart from names, mean equal datasets.
    """
    validation = corpus.validation
    return {
        "names": [without_secrets(name) for name in corpus.names],
        "fingerprint": corpus.fingerprint,
        "tokenizer": tokenizer_mark(options.tokenizer),
        "pattern": options.pattern,
        "end_of_text": options.end_of_text,
        "text_field": options.text_field or _default_fields(corpus),
        "split": NAMED if validation else _normalised("split", corpus.split),
        "val": [without_secrets(name) for name in validation.names] if validation else None,
        "val_fingerprint": validation.fingerprint if validation else None,
        "max_documents": options.max_documents,
        "max_bytes": options.max_bytes,
        "on_bad_row": options.on_bad_row,
        "mask_field": options.mask_field,
        "duplicates": None if options.duplicates == "keep" else options.duplicates,
        "include": list(options.include) or None,
        "encoding": options.encoding,
    }


def _default_fields(corpus: Corpus) -> str:
    """Return the fields read by default: each card's own, and `text` for everything else."""
    names = (*corpus.names, *(corpus.validation.names if corpus.validation else ()))
    cards = DATASETS.names()
    return " and ".join(
        sorted({load_card(name).text_field if name in cards else DEFAULT_FIELD for name in names})
    )


def _normalised(key: str, value: Any) -> Any:
    """Return one spelling for equivalent values; old manifests contain them as typed."""
    if key == "text_field":
        return value or DEFAULT_FIELD
    if key == "split" and value not in (None, NAMED):
        kind, fraction = parse_rule(value)
        return f"{kind} {fraction}"
    return value


def tokenizer_mark(spec: str) -> str:
    """Return the identity of a tokenizer: its name, or the digest of its file.

    Raises: DataError when its file cannot be read, or is missing from a directory.
    """
    if kind_named(spec) is not None:
        return spec
    path = tokenizer_path(spec)
    return f"sha256:{hashlib.sha256(read_tokenizer(path)).hexdigest()}" if path.is_file() else spec


def require_same(
    what: str, existing: Mapping[str, Any], requested: Mapping[str, Any], *, fix: str
) -> None:
    """Check that two descriptions are of the same dataset.

    Raises: OutputInUse that starts with `what` and lists the differences.
    """
    if different := difference(existing, requested):
        raise OutputInUse(f"{what}: {different}.", fix=fix)


def difference(existing: Mapping[str, Any], requested: Mapping[str, Any]) -> str:
    """Return how two descriptions differ, in words; empty when they are of the same dataset."""
    different = {
        key: (there, wanted)
        for key in requested
        if key not in ("names", "val")
        and (there := _normalised(key, existing.get(key)))
        != (wanted := _normalised(key, requested[key]))
    }
    words = [
        f"{key} is {there!r}, and {wanted!r} is requested"
        for key, (there, wanted) in different.items()
        if not key.endswith("fingerprint") and key != "metadata"
    ]
    for key, names_key, text in (
        ("fingerprint", "names", "text"),
        ("val_fingerprint", "val", "validation text"),
    ):
        if key in different:
            there, wanted = (
                " ".join(one.get(names_key) or ["nothing"]) for one in (existing, requested)
            )
            words.append(
                f"the {text} has changed"
                if there == wanted
                else f"its {text} is {there}, and {wanted} is requested"
            )
    if "metadata" in different:
        words.append("metadata.json has changed")
    return "; ".join(words)
