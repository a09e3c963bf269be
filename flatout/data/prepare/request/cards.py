"""Dataset cards: named corpora in `flatout/datasets/`."""

from __future__ import annotations

from typing import Self

from pydantic import AliasChoices, Field, ValidationError, model_validator

from flatout.config.sections import Section
from flatout.errors import ConfigError, DataError
from flatout.registry import DATASETS


class Card(Section):
    """A named corpus, `flatout/datasets/NAME.yaml`: a file to download, or a repository's files.

    A file is downloaded once; files of a Hugging Face dataset are read in place.
    """

    url: str | None = Field(default=None, validation_alias=AliasChoices("url", "address"))
    """URL of its file; cards of earlier versions call it `address`."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Checksum of that file."""
    num_bytes: int | None = Field(default=None, ge=1)
    """Size of that file."""
    repository: str | None = Field(default=None, pattern="^[^/@]+/[^/@]+$")
    """The Hugging Face dataset that contains its files."""
    files: str | None = None
    """Glob of its files inside the repository."""
    validation: str | None = None
    """Glob of the validation files there; None leaves validation to the split rule."""
    revision: str
    """Version of the file; for a repository, a commit."""
    license: str
    """License of the text."""
    source: str = "files"
    """Source that reads it; it is called with `path`."""
    text_field: str = "text"
    """Field of a row that contains the text."""
    split: str | None = None
    """Its split rule, when it has no validation files; None leaves it to prepare."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        of_file = [given is not None for given in (self.url, self.sha256, self.num_bytes)]
        of_repository = [given is not None for given in (self.repository, self.files)]
        is_file = all(of_file) and not any(of_repository) and self.validation is None
        is_repository = all(of_repository) and not any(of_file)
        if not is_file and not is_repository:
            raise ConfigError(
                "A card names one file or a repository.",
                fix="Set url, sha256 and num_bytes, or repository, files and perhaps "
                "validation, but not both.",
            )
        if self.validation is not None and self.split is not None:
            raise ConfigError(
                "A card has a split rule or validation files, not both.",
                fix="Leave split or validation out.",
            )
        return self

    @property
    def fields(self) -> dict[str, str]:
        """The text field, when the card sets it."""
        return {"text_field": self.text_field} if "text_field" in self.model_fields_set else {}

    def url_of(self, files: str) -> str:
        """Return the URL of files in its repository."""
        return f"hf://datasets/{self.repository}@{self.revision}/{files}"


def load_card(name: str) -> Card:
    """Return a dataset card.

    Raises: ConfigError when there is no card of this name; DataError when its file is invalid.
    """
    try:
        return Card.model_validate(DATASETS.get(name))
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{DATASETS.path(name)}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}.",
            fix="Correct the card.",
        ) from error
