"""Convert another tool's config into a recipe, and say what becomes of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from flatout.commands import Argument, Command, Option
from flatout.config.convert import Conversion, Item, convert, read_settings
from flatout.config.schema import nested
from flatout.config.units import HUB, SOURCE
from flatout.errors import ConfigError, in_shell
from flatout.files import expanded, write_text, writing
from flatout.json_io import JsonObject, Result
from flatout.recognised import require_local
from flatout.registry import SUFFIXES

MARK = "# Converted by `flatout convert`"
"""Start of a file that may be overwritten."""
PREPARE = "Prepare the data first"
HEADINGS = {
    "mapped": "Mapped",
    "missing": "Not in flatout",
    "unknown": "Unknown",
    "unnecessary": "Nothing to set",
}
"""The outcomes in the order of the summary."""


class ConvertResult(Result):
    """What became of a config's keys."""

    path: str
    """The recipe that was written."""
    tool: str | None
    """The tool that the config belongs to, if it was recognised."""
    mapped: int
    """Keys with a counterpart, which the recipe or a command of `prepare` has."""
    unnecessary: int
    """Keys that need none."""
    missing: int
    """Keys without a counterpart."""
    unknown: int
    """Keys that flatout does not know, or that a Python file computes."""
    items: list[Item]
    """Every key with its value, what it becomes and why."""
    defaults: JsonObject
    """The tool's own defaults that the recipe states, by the tool's keys."""
    prepare: list[str]
    """The commands that prepare the data, with the options that the config's keys ask for."""
    closing: str = Field(exclude=True, repr=False)
    """The summary, as text."""

    def summary(self) -> str:
        """Return each key with its counterpart, and the next step."""
        return self.closing


def convert_config(
    config: Annotated[Path | str, Argument("A config: YAML, JSON, TOML, or Python that assigns.")],
    out: Annotated[Path | str, Option("The recipe to write, a YAML file.")],
) -> ConvertResult:
    """Convert another tool's config into a recipe, and say what becomes of every key.

    It reads the configs of nanoGPT, litgpt, torchtitan, Axolotl and the Hugging Face Trainer, and
    others with the same words. Code in them is never executed.

    Raises: ConfigError when no key has a counterpart, or when `out` has another file.
    """
    require_local(config)
    require_local(out, "--out ")
    source, target = expanded(config), expanded(out)
    _require_free(target)
    found = convert(*read_settings(source))
    if not found.values:
        raise ConfigError(
            f"{source} has no key with a counterpart in flatout.",
            fix="Name the config of a training tool; docs/coming-from.md lists the keys.",
        )
    text = _recipe(source, found)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, text)
    counts = {name: sum(item.outcome == name for item in found.items) for name in HEADINGS}
    return ConvertResult(
        path=str(target),
        tool=found.tool.name if found.tool else None,
        items=found.items,
        defaults=found.defaults,
        prepare=_preparation(found),
        closing=_closing(source, target, found),
        mapped=counts["mapped"],
        unnecessary=counts["unnecessary"],
        missing=counts["missing"],
        unknown=counts["unknown"],
    )


def _require_free(target: Path) -> None:
    """Check that `target` is a YAML file that is absent or that this command wrote."""
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out {target} is not a YAML file.", fix="For example --out my.yaml.")
    other = "Choose another file with --out FILE."
    if target.is_dir():
        raise ConfigError(f"{target} is a directory.", fix=other)
    if target.exists() and not target.read_text(encoding="utf-8", errors="replace").startswith(
        MARK
    ):
        raise ConfigError(f"{target} exists, and `flatout convert` did not write it.", fix=other)


def _recipe(source: Path, found: Conversion) -> str:
    """Return the recipe as YAML, with what it lacks as comments."""
    body = yaml.safe_dump(nested(found.values), sort_keys=False, allow_unicode=True)
    lacks = [item for item in found.items if item.outcome in ("missing", "unknown")]
    lines = [f"{MARK} from {source.name}{_of_tool(found)}"]
    lines += [f"# Not converted: {_shown(item)}: {item.why}" for item in lacks]
    lines += [f"# {PREPARE}: {command}" for command in _preparation(found)]
    return "\n".join(" ".join(line.split()) for line in lines) + f"\n{body}"


def _closing(source: Path, target: Path, found: Conversion) -> str:
    lines = [f"{target}  written from {source}{_of_tool(found)}"]
    for outcome, heading in HEADINGS.items():
        items = [item for item in found.items if item.outcome == outcome]
        width = min(40, max((len(_shown(item)) for item in items), default=0))
        lines += ["", f"{heading}: {len(items)}"] if items else []
        lines += [f"  {_shown(item):<{width}}  {_result(item)}" for item in items]
    if found.defaults and found.tool:
        stated = ", ".join(f"{key}={value}" for key, value in found.defaults.items())
        lines += ["", f"Added, as defaults of {found.tool.name}: {stated}"]
    lines += ["", f"Next: flatout plan {target}"]
    lines += [f"{PREPARE}: {command}" for command in _preparation(found)]
    return "\n".join(lines)


def _preparation(found: Conversion) -> list[str]:
    """Return the command that prepares each dataset; weights from a hub have their tokenizer."""
    options = dict(found.options)
    source = options.pop(SOURCE, SOURCE)
    path, mix = found.values.get("data.path"), found.values.get("data.mix", {})
    weights = str(found.values.get("train.init_from"))
    if weights.startswith(HUB):
        options.setdefault("--tokenizer", weights.removeprefix(HUB))
    words = " ".join(f"{option} {in_shell(value)}" for option, value in options.items())
    paths = [path] if path else [*mix] or (["data/mine"] if found.options else [])
    return [
        f"flatout prepare {in_shell(source)} --out {in_shell(one)} {words}".rstrip()
        for one in paths
    ]


def _of_tool(found: Conversion) -> str:
    return f" ({found.tool.name})" if found.tool else ""


def _shown(item: Item) -> str:
    text = f"{item.key}={item.value}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _result(item: Item) -> str:
    becomes = " ".join(f"{key}={value}" for key, value in item.becomes.items())
    return " ".join(part for part in (becomes, item.why) if part)


COMMAND = Command(
    convert_config,
    example="flatout convert old-config.yaml --out my.yaml",
    writes_files=True,
)
