"""Convert another tool's config into a recipe, key by key."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command
from flatout.config.convert import Conversion, Item, Outcome, convert, read_settings
from flatout.config.documents import dump_yaml
from flatout.config.registry import DATASETS, SUFFIXES, unknown_name
from flatout.config.schema import nested, validate
from flatout.config.signature import Argument, Option, checked
from flatout.config.units import HUB, SOURCE
from flatout.config.words import listings, word_for
from flatout.errors import ConfigError, UsageError, in_shell
from flatout.storage.files import Stored, expanded, write_text, writing
from flatout.storage.json_io import JsonObject, Result
from flatout.storage.recognised import require_local

MARK = "# Converted by `flatout convert`"
"""Start of a file that may be overwritten."""
PREPARE = "Prepare the data first"
GPT2_VOCABULARY = (50_257, 50_304)
"""Sizes of the vocabulary of GPT-2's tokenizer, without and with padding."""
HEADINGS = {
    "mapped": "Mapped",
    "missing": "Not in flatout",
    "unknown": "Unknown",
    "unnecessary": "Nothing to set",
}
"""The outcomes in the order of the summary."""
OUTCOMES: dict[str, Outcome] = {"left_out": "unnecessary", "missing": "missing"}
"""The outcomes of words by their group. Keys of the other groups have a counterpart."""


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
    notes: list[str]
    """What to know about the recipe."""
    prepare: list[str]
    """The commands that prepare the data, with the options that the config's keys ask for."""

    def summary(self) -> str:
        """Return each key with its counterpart, and the next step."""
        tool = f" ({self.tool})" if self.tool else ""
        lines = [f"{self.path}  written{tool}"]
        rows = []
        for item in self.items:
            becomes = (f"{key}={value}" for key, value in item.becomes.items())
            result = " ".join([*becomes, *([item.why] if item.why else [])])
            rows.append((item.outcome, _shown(item), result))
        lines += _by_outcome(rows)
        if self.defaults:
            stated = ", ".join(f"{key}={value}" for key, value in self.defaults.items())
            lines += ["", f"Added, as defaults of {self.tool}: {stated}"]
        lines += [f"\nNote: {note}" for note in self.notes]
        lines += ["", f"Next: flatout plan {self.path}"]
        return "\n".join([*lines, *(f"{PREPARE}: {command}" for command in self.prepare)])


class Counterpart(Stored):
    """What a key of another tool is called in flatout."""

    key: str
    """The other tool's key, dotted if it is in a section."""
    outcome: Outcome
    """mapped, unnecessary (nothing to set), or missing (no counterpart)."""
    counterpart: str
    """The key of flatout, or the option of `flatout prepare`. Empty if there is none."""
    note: str
    """What to know about it, or why there is no counterpart."""


class KeysResult(Result):
    """The keys of a tool's configs and their counterparts."""

    tool: str
    """The tool's name."""
    keys: list[Counterpart]
    """Its keys in alphabetical order."""

    def summary(self) -> str:
        """Return each key with its counterpart and a remark."""
        rows = [
            (one.outcome, one.key, f"{one.counterpart:<24} {one.note}".strip()) for one in self.keys
        ]
        return "\n".join([f"Keys of {self.tool}", *_by_outcome(rows)])


@checked
def convert_config(
    config: Annotated[
        Path | str | None, Argument("A config: YAML, JSON, TOML, or Python that assigns.")
    ] = None,
    out: Annotated[Path | str | None, Option("The recipe to write, a YAML file.")] = None,
    keys: Annotated[
        str | None,
        Option(
            "Show the counterparts of a tool's keys instead: axolotl, eigenstate, litgpt, nanogpt, "
            "neox, torchtitan or trainer (Hugging Face)."
        ),
    ] = None,
) -> ConvertResult | KeysResult:
    """Convert another tool's config into a recipe, and report what becomes of each key.

    It reads the configs of nanoGPT, litgpt, torchtitan, Axolotl and the Hugging Face Trainer, and
    others with the same words. Code in them is never executed. With `--keys TOOL` it shows
    the keys of that tool and their counterparts instead.

    Raises: ConfigError when no key has a counterpart, when `out` is a different file, or when
                    there is no such tool.
    """
    if keys is not None:
        return _keys_of(keys.lower())
    if config is None or out is None:
        raise UsageError(
            "`flatout convert` needs a config and --out.", fix=f"For example `{COMMAND.example}`."
        )
    require_local(config)
    require_local(out, "--out ")
    source, target = expanded(config), expanded(out)
    if target.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out {target} is not a YAML file.", fix="For example --out my.yaml.")
    other = "Choose a different file with --out FILE."
    if target.is_dir():
        raise ConfigError(f"{target} is a directory.", fix=other)
    if target.exists() and not target.read_bytes().startswith(MARK.encode()):
        raise ConfigError(f"{target} exists, and `flatout convert` did not write it.", fix=other)
    document, computed = read_settings(source)
    with suppress(ConfigError):
        validate(document)
        if any(isinstance(section, dict) for section in document.values()):
            raise UsageError(
                f"{source} is a recipe of flatout already.",
                fix=f"Use it as it is: `flatout train {in_shell(source)}`.",
            )
    found = convert(document, computed)
    if not found.values:
        raise ConfigError(
            f"{source} has no key with a counterpart in flatout.",
            fix="Name the config of a training tool. `--keys nanogpt` shows nanoGPT's keys.",
        )
    tool, commands = found.tool.name if found.tool else None, _preparation(found)
    lines = [f"{MARK} from {source.name}{f' ({tool})' if tool else ''}"]
    lines += [
        f"# Not converted: {_shown(item)}: {item.why}"
        for item in found.items
        if item.outcome in ("missing", "unknown")
    ]
    lines += [f"# {PREPARE}: {command}" for command in commands]
    comments = "\n".join(" ".join(line.split()) for line in lines)
    body = dump_yaml(nested(found.values))
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, f"{comments}\n{body}")
    return ConvertResult(
        path=str(target),
        tool=tool,
        items=found.items,
        defaults=found.defaults,
        notes=_epochs(found),
        prepare=commands,
        **{name: sum(item.outcome == name for item in found.items) for name in HEADINGS},
    )


def _keys_of(tool: str) -> KeysResult:
    """Return the counterparts of the keys of a tool.

    Raises: ConfigError when there is no such tool.
    """
    known = listings()
    if tool not in known:
        raise unknown_name("tool", tool, known)
    found = []
    for key in known[tool]:
        if word := word_for(key):
            option = f"prepare {word.option}" if word.option else ""
            outcome, name = OUTCOMES.get(word.group, "mapped"), word.key or option
            found.append(Counterpart(key=key, outcome=outcome, counterpart=name, note=word.note))
    return KeysResult(tool=tool, keys=found)


def _epochs(found: Conversion) -> list[str]:
    """Return how many steps the epochs of a script's own loader may be.

    Loaders of characters often start a sample at every position, so that an epoch reads each of
    them as many times as a sample is long.
    """
    values, source = found.values, found.options.get(SOURCE)
    epochs, rows, seq_len = (
        values.get(key) for key in ("train.epochs", "batch.rows_per_device", "data.seq_len")
    )
    if found.tool or not (epochs and seq_len and isinstance(rows, int)):
        return []
    size = DATASETS.get(source).get("num_bytes") if source in DATASETS.names() else None
    size = min(filter(None, (size, found.options.get("--max-bytes"))), default=None)
    note = (
        "an epoch of flatout reads every token once. If the samples of the old loader start at "
        f"every position, its epochs are {seq_len:,} times longer"
    )
    if size is None:
        return [f"{note}: give the length in steps then, train.steps."]
    steps = round(epochs * size / (rows * (values.get("batch.accumulate") or 1)))
    return [f"{note}: for about {steps:,} steps, set train.steps={steps} and remove train.epochs."]


def _preparation(found: Conversion) -> list[str]:
    """Return the command that prepares each dataset. Weights from a hub have their tokenizer."""
    options = dict(found.options)
    source = options.pop(SOURCE, SOURCE)
    path, mix = found.values.get("data.path"), found.values.get("data.mix", {})
    weights = str(found.values.get("train.init_from"))
    if weights.startswith(HUB):
        options.setdefault("--tokenizer", weights.removeprefix(HUB))
    if source == "shakespeare" and "model.vocab_size" not in found.values:
        options.setdefault("--tokenizer", "char")
    if found.values.get("model.vocab_size") in GPT2_VOCABULARY:
        options.setdefault("--tokenizer", "openai-community/gpt2")
    words = " ".join(f"{option} {in_shell(value)}" for option, value in options.items())
    paths = [path] if path else [*mix] or (["data/mine"] if found.options else [])
    return [
        f"flatout prepare {in_shell(source)} --out {in_shell(one)} {words}".rstrip()
        for one in paths
    ]


def _by_outcome(rows: list[tuple[Outcome, str, str]]) -> list[str]:
    """Return rows of two columns as lines under a heading for each outcome."""
    lines: list[str] = []
    for outcome, heading in HEADINGS.items():
        found = [row for row in rows if row[0] == outcome]
        width = min(40, max((len(key) for _, key, _ in found), default=0))
        lines += ["", f"{heading}: {len(found)}"] if found else []
        lines += [f"  {key:<{width}}  {result}" for _, key, result in found]
    return lines


def _shown(item: Item) -> str:
    text = f"{item.key}={item.value}"
    return text if len(text) <= 60 else f"{text[:57]}..."


COMMAND = Command(
    convert_config,
    example="flatout convert old-config.yaml --out my.yaml",
    writes_files=True,
)
