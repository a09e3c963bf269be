"""The options of `prepare` that shape a dataset, and its split rules as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from flatout.errors import DataError

NAMED = "named"
"""The split rule of a dataset whose validation text is given separately."""


def parse_rule(text: str) -> tuple[str, float]:
    """Return the kind, `tail` or `hash`, and the fraction of a split rule.

    Raises: DataError when the text is not a split rule.
    """
    match = re.fullmatch(r"\s*(tail|hash)[\s:=]+([0-9.eE-]+)\s*", text)
    try:
        kind, fraction = (match[1], float(match[2])) if match else ("", 0.0)
    except ValueError:
        kind, fraction = "", 0.0
    if not 0 < fraction < 1:
        raise DataError(
            f"{text!r} is not a split rule.",
            fix="Write 'tail 0.1' (the last tenth) or 'hash 0.01' (one document in a hundred).",
        )
    return kind, fraction


OnBadRow = Literal["raise", "skip"]


@dataclass(frozen=True)
class Options:
    """Everything that shapes a dataset except its sources.

    The command `prepare` describes each option and checks its type.
    """

    tokenizer: str = "train:4096"
    pattern: str | None = None
    end_of_text: str | None = None
    text_field: str | None = None
    split: str | None = None
    max_documents: int | None = None
    max_bytes: int | None = None
    on_bad_row: OnBadRow = "raise"
    max_bad_rows: int | None = None
    mask_field: str | None = None
    val: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    chat: str | None = None

    def check(self) -> None:
        """Check the options that can be checked before anything is read.

        Raises: DataError for an invalid or contradictory option.
        """
        if self.max_bad_rows is not None and self.on_bad_row != "skip":
            raise DataError(
                f"--max-bad-rows {self.max_bad_rows} needs --on-bad-row skip.",
                fix="For example, write --on-bad-row skip --max-bad-rows 100.",
            )
        if self.chat is not None and self.mask_field is not None:
            raise DataError(
                "--mask-field and --chat cannot be combined: the roles of a conversation decide "
                "what the loss omits.",
                fix="Remove one of the two.",
            )
        if self.mask_field is not None and self.mask_field == (self.text_field or "text"):
            raise DataError(
                f"--mask-field and the text are the same field: {self.mask_field!r}.",
                fix="Name the field of the prompt, or remove --mask-field.",
            )
        if self.chat is not None and self.max_bytes is not None:
            raise DataError(
                "--max-bytes and --chat cannot be combined: a conversation is not cut.",
                fix="Limit the conversations with --max-documents.",
            )
        if self.tokenizer.endswith(".gz"):
            raise DataError(
                f"The tokenizer {self.tokenizer} is compressed.",
                fix="Decompress it first, for example with `gunzip --keep`.",
            )
        if self.split is not None:
            parse_rule(self.split)
            if self.val:
                raise DataError(
                    f"--val names the validation text, and --split {self.split!r} takes it from "
                    "the training text.",
                    fix="Remove one of the two.",
                )
