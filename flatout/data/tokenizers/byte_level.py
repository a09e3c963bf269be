"""What of a tokenizer.json decides its ids, where it is a byte-level BPE of the kind that GPT-2,
Llama 3 and Qwen have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from flatout.data.tokenizers.base import Encode
from flatout.data.tokenizers.bpe import byte_level_alphabet
from flatout.data.tokenizers.engines import (
    after_nfc,
    around_added_tokens,
    cannot,
    gigatoken_of_json,
    tiktoken_of,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What the ByteLevel pre-tokeniser of `tokenizers` splits by."""

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

CUT_PATTERNS = frozenset({_GPT2, _LLAMA3, _QWEN2})
"""Those of which `tokenizers_cuts` proves where a text may be cut."""


@dataclass(frozen=True)
class Layout:
    """A byte-level BPE, taken apart."""

    model: Mapping[str, Any]
    """The model of the file: vocabulary, merges, ignore_merges."""
    pre_tokenizer: Mapping[str, Any]
    pattern: str
    """The regular expression that the pre-tokeniser splits by."""
    normalizer: Literal["NFC"] | None
    raw_added: Mapping[str, int | None]
    """Added tokens looked for in the text as it comes; None for special ones, which stay text."""
    normalized_added: Mapping[str, int | None]
    """Added tokens looked for in the normalised text, between the others."""

    @property
    def splits_in_bounds(self) -> bool:
        """Whether the pattern is one of the usual ones, whose time and memory a text's length
        bounds.
        """
        return self.pattern in CUT_PATTERNS

    @property
    def cuts_are_known(self) -> bool:
        """Whether `tokenizers_cuts` proves where a text may be cut: by the pattern, and as no kept
        token holds white space.
        """
        kept = [
            content
            for added in (self.raw_added, self.normalized_added)
            for content, index in added.items()
            if index is not None
        ]
        return self.pattern in CUT_PATTERNS and not any(
            character.isspace() for content in kept for character in content
        )

    def gigatoken(self) -> Encode:
        """Return gigatoken for it.

        Raises: MissingPackage; DataError when it cannot be used.
        """
        bare: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": self.pre_tokenizer,
        }
        return self._complete(
            gigatoken_of_json(
                bare
                | {"post_processor": None, "decoder": {"type": "ByteLevel"}, "model": self.model}
            )
        )

    def tiktoken(self) -> Encode:
        """Return tiktoken for it: ids taken as ranks, which they are when they grow along the
        merges.

        Raises: MissingPackage; DataError when it cannot be used.
        """
        ranks = self._ranks()
        try:
            return self._complete(tiktoken_of("tokenizer.json", ranks, self.pattern))
        except ValueError as error:
            raise cannot("tiktoken", str(error).rstrip(".")) from error

    def _ranks(self) -> dict[bytes, int]:
        byte_of = byte_level_alphabet()
        vocabulary: Mapping[str, int] = self.model["vocab"]
        results = [
            "".join(merge.split(" ") if isinstance(merge, str) else merge)
            for merge in self.model["merges"]
        ]
        ids = [vocabulary.get(result, -1) for result in results]
        if (
            any(later <= earlier for earlier, later in pairwise(ids))
            or -1 in ids
            or not byte_of.keys() <= vocabulary.keys()
        ):
            raise cannot("tiktoken", "its ids do not grow along its merges")
        reached = vocabulary if self.model.get("ignore_merges") else [*byte_of, *results]
        return {
            bytes(byte_of[character] for character in piece): vocabulary[piece]
            for piece in reached
            if byte_of.keys() >= set(piece)
        }

    def _complete(self, encode: Encode) -> Encode:
        encode = around_added_tokens(encode, self.normalized_added)
        return around_added_tokens(after_nfc(encode) if self.normalizer else encode, self.raw_added)


def layout_of(definition: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a parsed tokenizer.json; None when it is of another kind."""
    model, pre_tokenizer = definition.get("model") or {}, definition.get("pre_tokenizer") or {}
    pattern, normalizer = _pattern(pre_tokenizer), (definition.get("normalizer") or {}).get("type")
    plain = not any(
        model.get(key)
        for key in (
            "dropout",
            "unk_token",
            "continuing_subword_prefix",
            "end_of_word_suffix",
            "byte_fallback",
        )
    )
    if (
        model.get("type") != "BPE"
        or not plain
        or pattern is None
        or normalizer not in (None, "NFC")
    ):
        return None
    added = definition.get("added_tokens") or []
    kept = [entry for entry in added if not entry.get("special")]
    if any(
        entry.get(flag) for entry in kept for flag in ("single_word", "lstrip", "rstrip")
    ) or not all(entry["content"] for entry in added):
        return None
    if normalizer is not None and any(entry.get("normalized") for entry in kept):
        return None
    raw, normalized = (
        {
            entry["content"]: None if entry.get("special") else int(entry["id"])
            for entry in added
            if bool(entry.get("normalized")) == wanted
        }
        for wanted in (False, True)
    )
    return Layout(model, pre_tokenizer, pattern, normalizer, raw, normalized)


def _pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """Return what a pre-tokeniser splits by; None when it is not one that splits by one pattern and
    then writes bytes.
    """
    if (
        pre_tokenizer.get("type") == "ByteLevel"
        and not pre_tokenizer.get("add_prefix_space")
        and pre_tokenizer.get("use_regex", True)
    ):
        return _GPT2
    steps = pre_tokenizer.get("pretokenizers") or []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, level = steps
    if (
        split.get("behavior") != "Isolated"
        or split.get("invert")
        or level.get("add_prefix_space")
        or level.get("use_regex", True)
    ):
        return None
    pattern = split.get("pattern", {}).get("Regex")
    return pattern if isinstance(pattern, str) else None
