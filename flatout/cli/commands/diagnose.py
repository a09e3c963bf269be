"""Show what slows a run down, with evidence, and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from flatout.assembly import preflight
from flatout.cli.commands import Command, Overrides
from flatout.config.registry import RECIPES, unknown_name
from flatout.config.schema import RunConfig, load_config
from flatout.config.signature import Argument, Option, checked
from flatout.errors import ConfigError, MissingPackage
from flatout.measure.diagnose.diagnosis import (
    FILE,
    Diagnosis,
    diagnosis_of,
    next_for_recipe,
    of_script,
)
from flatout.measure.diagnose.recorded import recorded_evidence
from flatout.measure.diagnose.spec import DEFAULT_SECONDS
from flatout.measure.scripts.request import Request
from flatout.measure.scripts.run import diagnose_script
from flatout.progress import SILENT, Progress
from flatout.storage.cache import default_cache
from flatout.training.run_dir import layout
from flatout.training.run_dir.lookup import RUNS, run_names
from flatout.training.run_dir.resume import settings_file


class DiagnoseResult(Diagnosis):
    """A verdict and its evidence."""

    path: str | None = None
    """findings.json in the run directory. Null when there is no run directory."""
    script_code: int | None = None
    """Exit code of a script. Null when it was ended after its measurement."""

    @property
    def exit_code(self) -> int:
        """As for `train`: 2 if the recipe cannot start, 1 if its measured steps failed, else 0.

        For a recorded run, it is 0. A script's is its own.
        """
        fails = any(finding.harm == "fails" for finding in self.findings)
        if not fails:
            return 0
        return {"preflight": 2, "measured run": 1, "script": self.script_code or 1}.get(
            self.source, 0
        )


@checked
def diagnose(
    recipe: Annotated[
        str | Path | None,
        Argument("A recipe's name, a YAML file, a run, or its directory (default: this machine)."),
    ] = None,
    overrides: Overrides = None,
    seconds: Annotated[
        float, Option("Seconds of ordinary steps to measure.", min=0.1)
    ] = DEFAULT_SECONDS,
    steps: Annotated[
        int | None, Option("Of a script: steps to measure, instead of --seconds.", min=1)
    ] = None,
    to_the_end: Annotated[
        bool, Option("Of a script: let it run to its end after the measurement.")
    ] = False,
    *,
    script: Sequence[str] = (),
    as_json: bool = False,
    progress: Progress = SILENT,
) -> DiagnoseResult:
    """Show what slows a training script or a run down, with evidence, and how to fix it.

    After `--` comes the command of any PyTorch training script, which is measured without an edit
    and ends once enough steps are measured: `flatout diagnose -- python train.py --epochs 3`.

    Without a recipe, it checks this machine and measures its rates. For a recipe, it checks the
    machine, the environment, the memory and the data, runs the recipe for some seconds in a
    separate process, and divides each step into waiting for data, host, computation, optimizer,
    logging, saving, garbage collection and compiling. For a run, it reads what the run has
    recorded. Nothing is trained, and only findings.json is written, into a run directory. What was
    not measured is null.
    Exit codes: 2 if a recipe cannot start, 1 if its measured steps fail.

    Raises: UsageError when there is no such recipe or run, or it cannot be resolved, or `out` is
            a different file; RunFailed.

    In Python, `script` are the words of the command (`as_json`: it prints to standard error).
    """
    if script:
        require_only_script(recipe is not None or overrides)
        request = Request(seconds=seconds, steps=steps, to_the_end=to_the_end)
        found, code = diagnose_script(script, request, as_json=as_json, progress=progress)
        known = of_script(found, script, code, to_the_end=to_the_end)
        return DiagnoseResult(**dict(found) | known, script_code=code)
    if steps is not None or to_the_end:
        how = "Write `flatout diagnose --steps 50 -- python train.py`, or remove them."
        raise ConfigError("--steps and --to-the-end only apply to a script.", fix=how)
    if recipe is None:
        try:
            from flatout.measure.diagnose.machine import machine_evidence
        except ImportError as error:
            raise MissingPackage(
                f"torch cannot be imported: {error}.", fix="Install it again: `pip install torch`."
            ) from error
        return DiagnoseResult(**dict(diagnosis_of(machine_evidence(progress=progress))))
    folder = find_recorded(recipe)
    if folder is not None and not overrides:
        found = diagnosis_of(recorded_evidence(folder))
        return DiagnoseResult(**dict(found), path=_write(found, folder, progress))
    config = _config(recipe, folder, overrides)
    if folder is None or overrides:
        preflight.check_names(config)
    from flatout.measure.diagnose.diagnose import diagnose_recipe  # imports torch

    evidence = diagnose_recipe(config, seconds=seconds, cache=default_cache(), progress=progress)
    found = diagnosis_of(evidence)
    then = next_for_recipe(found, config, recipe, overrides or ())
    return DiagnoseResult(**dict(found) | {"next": then})


def require_only_script(has_more: object) -> None:
    """Check that nothing is given besides a script.

    Raises: ConfigError when something is.
    """
    if has_more:
        raise ConfigError(
            "A script after -- cannot be combined with a recipe and its options.",
            fix="Write `-- python train.py` alone.",
        )


def _write(diagnosis: Diagnosis, folder: Path, progress: Progress) -> str | None:
    """Write findings.json and return its path. None when the run directory cannot be written."""
    try:
        return str(diagnosis.write(folder))
    except OSError as error:
        progress.say(
            f"{folder / FILE} cannot be written ({error.strerror or error}), so `flatout report` "
            "will not show these findings."
        )
        return None


def find_recorded(name: str | Path) -> Path | None:
    """Return the run directory that a name means: a path, or a name under runs/. None: none."""
    paths = (Path(name), RUNS / name) if str(name) else ()
    return next((path for path in paths if (path / layout.CONFIG).exists()), None)


def _config(
    recipe: str | Path,
    folder: Path | None,
    overrides: Sequence[str] | None,
) -> RunConfig:
    """Return the configuration to measure. For a run, it is the one that the run started with.

    Raises: UsageError.
    """
    if folder is not None:
        return load_config(settings_file(folder), overrides or ())
    path, name, known = Path(recipe), str(recipe), RECIPES.names()
    if len(path.parts) > 1 and path.parent == RUNS and not path.exists():
        raise ConfigError(f"There is no run directory {path}.", fix="`flatout runs` lists them.")
    if not {"/", "."} & set(name) and name not in known and not Path(f"{name}.yaml").exists():
        raise unknown_name("recipe or run", name, [*known, *run_names()])
    return load_config(recipe, overrides or ())


COMMAND = Command(
    diagnose,
    example="flatout diagnose shakespeare-char data.path=data/s",
    writes_files=False,
    is_timed=True,
)
