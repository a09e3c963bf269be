"""Models that `flatout export` wrote for transformers, as `flatout eval` takes them. No torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from flatout.config.trust import BY_ARGUMENT
from flatout.errors import CheckpointError, ConfigError, MissingPackage, UntrustedCode, in_shell
from flatout.models.families.export_mark import MARK, format_of
from flatout.storage.json_io import read_json
from flatout.training.run_dir.layout import CONFIG

CONFIGS = ("config.json", "tokenizer_config.json")
"""Files that name code to import."""
PACKAGES = ("lm_eval", "transformers", "accelerate")
"""What scoring on tasks needs."""


def is_export(path: Path | str | None) -> bool:
    """Return whether a path is the directory of an export."""
    return path is not None and (Path(path) / MARK).is_file()


def is_run(path: Path | str | None) -> bool:
    """Return whether a command reads a run, not another tool's model. None is the newest run.

    What does not exist counts as the name of a run.
    """
    if path is None or str(path).startswith("hf:"):
        return path is None
    return not os.path.exists(path) or (Path(path) / CONFIG).is_file()


def require_scorable(folder: Path, *, trust_code: bool = False) -> None:
    """Check that transformers can load an export, and that the code in it may be imported.

    Raises: ConfigError for an export of a different format; UntrustedCode; CheckpointError when a
    file
            of the configuration is missing or damaged.
    """
    made_for = format_of(folder)
    if made_for != "huggingface":
        raise ConfigError(
            f"{folder} is an export for {made_for or 'an unknown format'}. transformers, which "
            "asks the questions of the tasks, cannot load it.",
            fix="Score the run itself, or export it with --to huggingface.",
        )
    if not (folder / CONFIGS[0]).is_file():
        raise CheckpointError(f"{folder} has no {CONFIGS[0]}.", fix="Export the run again.")
    code = [name for name in CONFIGS if (folder / name).is_file() and _names_code(folder / name)]
    if code and not trust_code:
        files = ", ".join(str(path) for path in sorted(folder.glob("*.py"))) or "none is there"
        raise UntrustedCode(
            f"{folder / code[0]} names code that loading the model would execute ({files}).",
            fix=f"Read that code. If you trust it, {BY_ARGUMENT}.",
        )


def _names_code(config: Path) -> bool:
    document = read_json(config)
    return isinstance(document, dict) and "auto_map" in document


def require_tasks(folder: Path, checkpoint: str | None, *, has_tasks: bool) -> None:
    """Check that the options suit an export, which has one model and no validation text.

    Raises: ConfigError.
    """
    if not has_tasks:
        raise ConfigError(
            f"{folder} is an export, which has no validation text.",
            fix=f"Score it on tasks, `flatout eval {in_shell(folder)} --tasks hellaswag`, or score "
            "the run that it was made from.",
        )
    if checkpoint not in (None, "best"):
        raise ConfigError(
            f"{folder} is an export of one checkpoint. --checkpoint {checkpoint} cannot choose "
            "another.",
            fix="Remove --checkpoint, or score the run.",
        )


def require_packages() -> None:
    """Check that lm-evaluation-harness is installed, with what its class for transformers needs.

    Raises: MissingPackage.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise MissingPackage(
            f"--tasks needs packages that are not installed: {' and '.join(missing)}.",
            fix='Install them: `pip install "flatout[tasks]"`.',
        )
