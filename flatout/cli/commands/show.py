"""Print a recipe as YAML to copy."""

from __future__ import annotations

from collections.abc import Callable

from flatout.cli.commands import Command, Overrides, RecipeName
from flatout.config.documents import dump_yaml, read_text
from flatout.config.registry import recipe_path
from flatout.config.schema import RunConfig, load_config
from flatout.config.signature import checked
from flatout.storage.json_io import Result


class RecipeText(Result):
    """A recipe as YAML."""

    text: str
    """The file's own text, or the keys that the recipe and the overrides set."""


@checked
def show(
    recipe: RecipeName,
    overrides: Overrides = None,
    *,
    write: Callable[[str], object] = lambda _text: None,
) -> RecipeText:
    """Print a recipe as YAML to copy, with overrides applied.

    Returns: the recipe; `write` receives its text, whose lines are not wrapped.
    Raises: ConfigError for an unknown recipe, key or value.
    """
    config = load_config(recipe, overrides)
    if overrides or isinstance(recipe, RunConfig):
        text = dump_yaml(config.model_dump(mode="json", exclude_unset=True))
    else:
        text = read_text(recipe_path(recipe), "a recipe")
    write(text)
    return RecipeText(text=text)


COMMAND = Command(show, example="flatout show gpt2-124m > my.yaml")
