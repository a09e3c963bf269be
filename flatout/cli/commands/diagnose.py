"""Show what slows a script or a run down, and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from flatout.assembly import preflight
from flatout.cli.commands import Command, Overrides
from flatout.config.registry import RECIPES, unknown_name
from flatout.config.schema import load_config
from flatout.config.signature import Argument, Option, checked, one_of, texts
from flatout.errors import ConfigError, MissingPackage
from flatout.measure.attach.request import DEFAULT_SECONDS, Request
from flatout.measure.diagnose.diagnosis import (
    Diagnosis,
    diagnosis_of,
    next_for_recipe,
    of_script,
)
from flatout.measure.diagnose.recorded import recorded_evidence
from flatout.measure.diagnose.script import diagnose_script
from flatout.progress import SILENT, Progress
from flatout.storage.cache import default_cache
from flatout.training.run_dir import layout
from flatout.training.run_dir.lookup import RUNS, find_run, run_names


@checked
def diagnose(
    recipe: Annotated[
        str | Path | None,
        Argument("A recipe's name, a YAML file, a run, or its directory (default: this machine)."),
    ] = None,
    overrides: Overrides = None,
    seconds: Annotated[
        float | None, Option("Seconds of ordinary steps to measure (default: 4).", min=0.1)
    ] = None,
    steps: Annotated[
        int | None, Option("Of a script: steps to measure, instead of --seconds.", min=1)
    ] = None,
    to_the_end: Annotated[
        bool, Option("Of a script: let it run to its end, and measure all of it.")
    ] = False,
    *,
    script: Sequence[str] = (),
    as_json: bool = False,
    progress: Progress = SILENT,
) -> Diagnosis:
    """Show what slows a training script or a run down, with evidence, and how to fix it.

    After `--` comes the command of any PyTorch training script, which is measured without an edit
    and ends once enough steps are measured: `flatout diagnose -- python train.py --epochs 3`.

    Without a recipe, it checks this machine and measures its rates. For a recipe, it checks the
    machine, the environment, the memory and the data, runs the recipe for some seconds in a
    separate process, and divides each step into waiting for data, host, computation, optimizer,
    logging, saving, garbage collection and compiling. For a run, it reads what the run has
    recorded. Nothing is trained or written. What was not measured is null.
    Exit codes: 2 if a recipe cannot start, 1 if its measured steps fail.

    Raises: UsageError when there is no such recipe or run, or it cannot be resolved, or `out` is
            a different file; RunFailed.

    In Python, `script` are the words of the command (`as_json`: it prints to standard error).
    """
    is_timed, seconds = seconds is not None, seconds or DEFAULT_SECONDS
    if script:
        require_one("diagnose", script, recipe, overrides)
        one_of({"--seconds": is_timed, "--steps or --to-the-end": steps or to_the_end})
        request = Request(seconds=seconds, steps=steps, to_the_end=to_the_end)
        found, code = diagnose_script(script, request, as_json=as_json, progress=progress)
        return of_script(found, script, code, to_the_end=to_the_end)
    if steps is not None or to_the_end:
        how = "Write `flatout diagnose --steps 50 -- python train.py`, or remove them."
        raise ConfigError("--steps and --to-the-end only apply to a script.", fix=how)
    if recipe is None and is_timed:
        how = "Name one, or remove it."
        raise ConfigError("--seconds only applies to a recipe or a script.", fix=how)
    if recipe is None:
        try:
            from flatout.measure.diagnose.machine import machine_evidence
        except ImportError as error:
            raise MissingPackage(
                f"torch cannot be imported: {error}.", fix="Install it again: `pip install torch`."
            ) from error
        return diagnosis_of(machine_evidence(progress=progress))
    named = (one for one in (Path(recipe), RUNS / recipe) if (one / layout.CONFIG).exists())
    folder, words = next(named, None), texts(overrides)
    if folder is not None and not words:
        one_of({"--seconds": is_timed, f"the records of {recipe}": True})
        return diagnosis_of(recorded_evidence(folder))
    if folder is None and Path(recipe).parent == RUNS and not Path(recipe).exists():
        find_run(recipe)  # raises, with the nearest name
    name, choices = str(recipe), [*RECIPES.names(), *run_names()]
    is_name = not {"/", "."} & {*name} and not Path(f"{name}.yaml").exists()
    if folder is None and is_name and name not in choices:
        raise unknown_name("recipe or run", name, choices)
    config = load_config(folder / layout.CONFIG if folder else recipe, words)
    preflight.check_settings(config)
    from flatout.measure.diagnose.recipe import diagnose_recipe  # imports torch

    found = diagnosis_of(
        diagnose_recipe(config, seconds=seconds, cache=default_cache(), progress=progress)
    )
    then = next_for_recipe(found, config, recipe, words)
    return found.model_copy(update={"next": then})


def require_one(command: str, script: Sequence[str], recipe: object, more: object) -> None:
    """Check that there is a script, without a recipe and `more` of its options, or a recipe.

    Raises: ConfigError.
    """
    more = recipe is not None or more
    one_of({"A script after --": script, "a recipe with its options": more})
    if not script and recipe is None:
        raise ConfigError(
            f"There is nothing to {command}.",
            fix=f"Name a recipe, or write `flatout {command} -- python train.py`.",
        )


COMMAND = Command(diagnose, example="flatout diagnose -- python train.py")
