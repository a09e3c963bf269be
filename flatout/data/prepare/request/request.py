"""A request to prepare a dataset: its text and options, opened and checked.

Its description in the manifest identifies the dataset: it decides whether a directory already
contains the requested one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from flatout.config.registry import DATASETS
from flatout.data.conversation.rendering import Renderer
from flatout.data.conversation.templates import (
    CHAT_TEMPLATE,
    CONFIG_FILE,
    TEMPLATE_FILE,
    load_template,
    named_template,
    stored_template,
    template_beside,
)
from flatout.data.prepare.request.inputs import Corpus, in_both_splits, load_card, open_corpus
from flatout.data.prepare.request.options import NAMED, Options, parse_rule
from flatout.data.store.manifest import MANIFEST, Manifest, read_manifest, storable
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import (
    END_OF_TEXT,
    existing_tokenizer,
    form_of,
    needs_corpus,
    read_tokenizer,
    require_used,
    stated_beside,
    tokenizer_path,
)
from flatout.data.tokenizers.hub import is_repository, repository_file
from flatout.errors import DataError, OutputInUse, in_shell
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import JsonObject
from flatout.storage.recognised import kind_of

CHOOSE_ANOTHER = "Choose a different --out, or remove what is there."
_TEXTS = {"fingerprint": ("names", "text"), "val_fingerprint": ("val", "validation text")}
"""The digests of texts in a description, with the key of their names, and what they are."""
NAME_TEMPLATE = "name a chat template: --chat chatml, --chat plain or --chat FILE"
CHATML_TOKENS = {"<|im_start|>", "<|im_end|>"}


class Access(TypedDict, total=False):
    """Arguments that do not shape the dataset: how sources are accessed."""

    from_file: str | None
    """A local copy of the dataset card's file, used instead of downloading it."""
    cache: Path | None
    """Directory for downloads. None means the user's cache."""
    progress: Progress


@dataclass(frozen=True)
class Request:
    """An opened corpus, and the options to prepare it with."""

    corpus: Corpus
    options: Options
    source: JsonObject
    """The description of both in the manifest."""
    progress: Progress


def open_request(
    sources: Sequence[str], out: Path, options: Options, **access: Unpack[Access]
) -> Request:
    """Return the request to prepare some sources.

    Raises: DataError for invalid options and an unusable `out`, before anything is read, and for
            sources that cannot be opened.
    """
    options.check()
    require_used(options.tokenizer, options.pattern, options.end_of_text)
    refuse_mount(out)
    progress = access.get("progress", SILENT)
    chat = chat_renderer(options, progress)
    corpus = open_corpus(sources, options, spool=out.resolve().parent, chat=chat, **access)
    shared = in_both_splits(corpus)
    if shared is not None:
        raise DataError(
            f"{shared} is both training and validation text: validating on training text measures "
            "nothing.",
            fix="Remove it from one of them.",
        )
    return Request(corpus, options, describe(corpus, options, chat), progress)


def chat_renderer(options: Options, progress: Progress = SILENT) -> Renderer | None:
    """Return what writes the conversations of a dataset as text. None when rows are text.

    `auto` takes the template that comes with the tokenizer, else chatml for a tokenizer that has
    its special tokens, else plain.

    Raises: DataError when the template or the tokenizer cannot be used.
    """
    if options.chat is None:
        return None
    spec, form = options.tokenizer, form_of(options.tokenizer)
    if needs_corpus(spec):
        special: tuple[str, ...] = (END_OF_TEXT,)
        end_of_text = END_OF_TEXT
    else:
        tokenizer = existing_tokenizer(
            spec, options.pattern, options.end_of_text, progress=progress
        )
        tokens = tokenizer.special_tokens()
        special = tuple(tokens)
        end_of_text = next(name for name, index in tokens.items() if index == tokenizer.eot_id)
    defaults = {"bos_token": "", "eos_token": end_of_text}
    template = None
    if form is None and (path := tokenizer_path(spec)).is_file():
        folder = path.parent
        if kind_of(folder) == "dataset":
            template = stored_template(read_manifest(folder).source)
        else:
            template = load_template(folder / CHAT_TEMPLATE) or template_beside(
                folder / CONFIG_FILE, folder / TEMPLATE_FILE, defaults
            )
    elif form is None and is_repository(spec):
        config, jinja = (
            repository_file(spec, name, progress=progress) for name in (CONFIG_FILE, TEMPLATE_FILE)
        )
        template = template_beside(config, jinja, defaults)
        if template is None and options.chat == "auto":
            for name in (CONFIG_FILE, TEMPLATE_FILE):
                repository_file(spec, name, otherwise=NAME_TEMPLATE)
    if options.chat != "auto":
        variables = template.variables if template else defaults
        template = named_template(options.chat, variables)
    elif template is None:
        name = "chatml" if set(special) >= CHATML_TOKENS else "plain"
        template = named_template(name, defaults)
        progress.say(f"The tokenizer has no chat template. Using {name}.")
    renderer = Renderer(template, special)
    _ = renderer.end  # rejects an unusable template before anything is read
    return renderer


def refuse_mount(out: Path) -> None:
    """Check that `out` can be replaced by a rename, or is already a dataset.

    Raises: DataError when it is a mount point.
    """
    target = out.resolve()
    if os.path.ismount(target) and not (target / MANIFEST).is_file():
        raise DataError(
            f"{out} is a mount point: the finished dataset is renamed into place, which a mount "
            "point does not allow.",
            fix=f"Choose a directory in it: --out {in_shell(out / 'NAME')}.",
        )


def refuse_occupied(out: Path) -> None:
    """Check that `out` is absent or an empty directory.

    Raises: DataError when it is not, or is a mount point.
    """
    refuse_mount(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise OutputInUse(
            f"{out} already exists and is not an empty directory.",
            fix=CHOOSE_ANOTHER,
        )


def existing_dataset(out: Path, source: JsonObject, progress: Progress) -> Manifest | None:
    """Return the manifest of `out` when it is the dataset that `source` describes, None when empty.

    Raises: DataError when it contains anything else.
    """
    if not (out / MANIFEST).is_file() or kind_of(out) in ("checkpoint", "export"):
        refuse_occupied(out)
        return None
    manifest = Dataset.open(out).manifest
    if different := difference(manifest.source, source):
        raise OutputInUse(f"{out} contains a different dataset: {different}.", fix=CHOOSE_ANOTHER)
    progress.say(f"{out} already contains this dataset: {manifest.tokens:,} tokens. Nothing to do.")
    return manifest


def describe(corpus: Corpus, options: Options, chat: Renderer | None) -> JsonObject:
    """Return the manifest's description of the text, the options and the chat template.

    Equal descriptions, apart from names, mean equal datasets.
    """
    validation, split, cards = corpus.validation, corpus.split, DATASETS.names()
    names = (*corpus.names, *(validation.names if validation else ()))
    fields = {load_card(name).text_field if name in cards else "text" for name in names}
    if split is not None:
        kind, fraction = parse_rule(split)
        split = f"{kind} {fraction}"
    described: JsonObject = {
        "names": [*map(storable, corpus.names)],
        "fingerprint": corpus.fingerprint,
        "tokenizer": tokenizer_mark(options.tokenizer),
        "pattern": options.pattern,
        "end_of_text": options.end_of_text,
        "text_field": options.text_field or " and ".join(sorted(fields)),
        "split": NAMED if validation else split,
        "val": [*map(storable, validation.names)] if validation else None,
        "val_fingerprint": validation.fingerprint if validation else None,
        "max_documents": options.max_documents,
        "max_bytes": options.max_bytes,
        "on_bad_row": options.on_bad_row,
        "mask_field": options.mask_field,
        "include": list(options.include) or None,
    }
    if chat is not None:
        described["chat_template"] = chat.template.model_dump(mode="json")
    return described


def tokenizer_mark(spec: str) -> str:
    """Return the identity of a tokenizer: its name, or the digest of its file, and the end-of-text
    token that a file beside it states.

    Raises: DataError when its file cannot be read, or is missing from a directory.
    """
    if form_of(spec) is not None:
        return spec
    path = tokenizer_path(spec)
    if not path.is_file():
        return spec
    stated = stated_beside(path)
    end = f" {stated[2]}" if stated else ""
    return f"sha256:{hashlib.sha256(read_tokenizer(path)).hexdigest()}{end}"


def difference(existing: JsonObject, requested: JsonObject) -> str:
    """Return how two descriptions differ, in words. Empty when they are of the same dataset.

    What was made without skipping bad rows has none, so it is also what skipping them gives.
    """
    words = []
    for key in {**requested, "chat_template": None}:
        there, wanted = existing.get(key), requested.get(key)
        if there == wanted or key in ("names", "val") or (key, there) == ("on_bad_row", "raise"):
            continue
        if (key, there) == ("tokenizer", str(wanted).partition(" ")[0]):
            continue  # an earlier version stored the digest alone
        if key == "chat_template":
            there, wanted = (one and one["name"] for one in (there, wanted))
        shown = f"{key} is {there!r}, and {wanted!r} is requested"
        if key in _TEXTS:
            names, text = _TEXTS[key]
            there, wanted = (
                " ".join(one.get(names) or ["nothing"]) for one in (existing, requested)
            )
            shown = f"its {text} is {there}, and {wanted} is requested"
            if there == wanted:
                shown = f"the {text} has changed"
        elif there == wanted:
            shown = "the chat template has changed"
        words.append(shown)
    return "; ".join(words)
