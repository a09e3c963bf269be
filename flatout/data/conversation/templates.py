"""Chat templates: the two that are built in, and those in files."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from flatout.config.registry import nearest
from flatout.errors import DataError
from flatout.storage.files import Stored, expanded
from flatout.storage.json_io import RESTORE, JsonObject, read_object
from flatout.storage.recognised import read_regular

CHAT_TEMPLATE = "chat_template.json"
"""The file of a run directory with the chat template of its data."""
FORMAT_VERSION = 1
MAX_CHARACTERS = 1 << 20
"""The longest templates in use have about 20,000 characters."""
CONFIG_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
"""The files in which Hugging Face stores a tokenizer's template."""

_CHATML = """\
{% for message in messages %}
{% if message.tool_calls %}
{{ raise_exception('it has no form for tool calls') }}
{% endif %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_PLAIN = """\
{% for message in messages %}
{% if message.tool_calls %}
{{ raise_exception('it has no form for tool calls') }}
{% endif %}
{{ ('' if loop.first else '\\n\\n') + message.role | capitalize + ':\\n' + message.content }}
{%- if message.role == 'assistant' %}
{{ eos_token }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ ('\\n\\n' if messages else '') + 'Assistant:\\n' }}
{%- endif %}
"""
BUILT_IN = {"chatml": _CHATML, "plain": _PLAIN}
"""chatml is the form of many chat models, and plain needs no special token but end-of-text."""


class ChatTemplate(Stored):
    """A chat template, as a manifest and a run directory store it."""

    format_version: int = FORMAT_VERSION
    """Version of this form."""
    name: str
    """Its name, or the name of its file."""
    text: str = Field(max_length=MAX_CHARACTERS)
    """The template, in the language of Jinja."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Further variables that it may use: bos_token, eos_token and the like."""

    def writes_as(self, other: ChatTemplate) -> bool:
        """Return whether both write every conversation in the same way, whatever their names."""
        return (self.text, self.variables) == (other.text, other.variables)


def named_template(name: str, variables: dict[str, str]) -> ChatTemplate:
    """Return the template of a name, chatml or plain, or of a file. `variables` are defaults.

    A file is a Jinja template, a tokenizer_config.json, or the chat_template.json of a run.

    Raises: DataError for a different name, or a file that cannot be read.
    """
    if name in BUILT_IN:
        return ChatTemplate(name=name, text=BUILT_IN[name], variables=variables)
    path = expanded(name)
    if not path.is_file():
        known = ["auto", *BUILT_IN]
        guess = nearest(name, known)
        raise DataError(
            f"There is no chat template {name!r}.",
            fix=f"Did you mean {guess!r}?"
            if guess
            else f"Use {', '.join(known)}, or a file with a Jinja template.",
        )
    if path.suffix != ".json":
        return _made(path, {"name": path.name, "text": _read(path), "variables": variables})
    document = read_object(path, fix=RESTORE)
    if "chat_template" in document:
        found = _of_config(document)
        if found is None:
            raise DataError(
                f"{path} has a chat_template that is not a template.", fix="Name a Jinja file."
            )
        stated = variables | tokens_in(document)
        return _made(path, {"name": path.name, "text": found, "variables": stated})
    return _made(path, document)


def load_template(path: Path) -> ChatTemplate | None:
    """Return the template in the chat_template.json of a run. None without one.

    Raises: DataError when it is damaged.
    """
    return _made(path, read_object(path, fix=RESTORE)) if path.is_file() else None


def template_beside(
    config: Path | None, jinja: Path | None, variables: dict[str, str]
) -> ChatTemplate | None:
    """Return the template of a Hugging Face tokenizer from its two files. None without one.

    Raises: DataError when a file cannot be read.
    """
    document = config_in(config) if config is not None else {}
    stated = variables | tokens_in(document)
    if jinja is not None and jinja.is_file():
        return _made(jinja, {"name": jinja.name, "text": _read(jinja), "variables": stated})
    text = _of_config(document)
    if text is None or config is None:
        return None
    return _made(config, {"name": config.name, "text": text, "variables": stated})


def stored_template(source: JsonObject) -> ChatTemplate | None:
    """Return the template in the `source` of a manifest. None when its rows were not chat data.

    Raises: DataError when a different version wrote it.
    """
    stored = source.get("chat_template")
    return None if stored is None else _made(Path("manifest.json"), stored)


def config_in(path: Path) -> JsonObject:
    """Return a tokenizer_config.json. It is empty when there is no such file.

    Raises: DataError when it cannot be read.
    """
    return read_object(path, fix=RESTORE) if path.is_file() else {}


def tokens_in(config: JsonObject) -> dict[str, str]:
    """Return the named special tokens of a tokenizer_config.json, such as bos_token."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _of_config(document: JsonObject) -> str | None:
    """Return the template in a tokenizer_config.json, which may list several by name."""
    stated = document.get("chat_template")
    if isinstance(stated, list):
        by_name = {one.get("name"): one.get("template") for one in stated if isinstance(one, dict)}
        stated = by_name.get("default")
    return stated if isinstance(stated, str) else None


def _made(path: Path, values: JsonObject) -> ChatTemplate:
    try:
        return ChatTemplate.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path} contains no chat template that this version reads: {where}: "
            f"{first['msg'].lower()}.",
            fix="Name a Jinja file, chatml or plain.",
        ) from error


def _read(path: Path) -> str:
    try:
        return read_regular(path)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "it is not UTF-8")
        raise DataError(
            f"Cannot read the chat template {path}: {why}.", fix="Check the file."
        ) from error
