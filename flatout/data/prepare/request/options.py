"""The options of `prepare` that shape a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flatout.data.prepare.request.split_rule import parse_rule
from flatout.errors import DataError

OnBadRow = Literal["raise", "skip"]
Duplicates = Literal["keep", "drop"]


@dataclass(frozen=True)
class Options:
    """Everything that shapes a dataset except its sources."""

    tokenizer: str = "train:4096"
    """char, byte, train:N, or a tokenizer file."""
    pattern: str | None = None
    """Regular expression that splits text, for an unknown .tiktoken file."""
    end_of_text: str | None = None
    """End-of-text token of a tokenizer.json that has none of the usual names."""
    text_field: str | None = None
    """Field of a row that contains the text."""
    split: str | None = None
    """Split rule; `make_plan` chooses one when None."""
    max_documents: int | None = None
    """Maximum number of documents to take."""
    max_bytes: int | None = None
    """Maximum bytes of text to take."""
    on_bad_row: OnBadRow = "raise"
    """Whether an unusable row is an error or is skipped."""
    max_bad_rows: int | None = None
    """Maximum number of rows to skip; None allows 1%, and at least 100."""
    mask_field: str | None = None
    """Field of a row that contains its prompt, which is packed but not a target."""
    duplicates: Duplicates = "keep"
    """Whether documents with the same prompt and text are kept or dropped."""
    val: tuple[str, ...] = ()
    """Sources of validation text; when empty, the card or the split rule decides."""
    include: tuple[str, ...] = ()
    """Patterns of further files to take from directories."""
    encoding: str | None = None
    """Encoding of text that is not UTF-8."""

    def check(self) -> None:
        """Check the options that can be checked before anything is read.

        Raises: DataError for an invalid or contradictory option.
        """
        for name, value in (
            ("--max-documents", self.max_documents),
            ("--max-bytes", self.max_bytes),
        ):
            if value is not None and value < 1:
                raise not_positive(name, value)
        for name, choice, choices in (
            ("--on-bad-row", self.on_bad_row, ("raise", "skip")),
            ("--duplicates", self.duplicates, ("keep", "drop")),
        ):
            if choice not in choices:
                raise DataError(
                    f"{name} {choice!r} is not known.", fix=f"Use {' or '.join(choices)}."
                )
        if self.max_bad_rows is not None and (self.on_bad_row != "skip" or self.max_bad_rows < 0):
            raise DataError(
                f"--max-bad-rows {self.max_bad_rows} needs --on-bad-row skip and a value of at "
                "least 0.",
                fix="Set --max-bad-rows to 0 or more, with --on-bad-row skip.",
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
                    fix="Leave one of the two out.",
                )


def not_positive(option: str, value: int) -> DataError:
    """Return the error for an option whose value must be at least 1."""
    return DataError(
        f"{option} {value} must be at least 1.", fix=f"Leave {option} out, or set it to 1 or more."
    )
