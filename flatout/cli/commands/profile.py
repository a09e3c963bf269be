"""Profile some steps of a script or a recipe: a trace and its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import Command, Overrides
from flatout.cli.commands.diagnose import require_one
from flatout.cli.commands.train import load_checked
from flatout.config.schema import RunConfig
from flatout.config.signature import Argument, Option, checked
from flatout.errors import UsageError
from flatout.measure.profile.result import Profile
from flatout.progress import SILENT, Progress
from flatout.storage.recognised import require_local

MOST_STEPS = 100
"""The profiler keeps every operation of every step in memory."""


@checked
def profile(
    recipe: Annotated[
        str | Path | RunConfig | None, Argument("A recipe's name, or a YAML file.")
    ] = None,
    overrides: Overrides = None,
    steps: Annotated[int, Option("Steps to profile.", min=1)] = 3,
    skip: Annotated[
        int | None,
        Option("Steps before them (default: until nothing is compiled).", min=1),
    ] = None,
    out: Annotated[
        Path | str | None, Option("Directory for the files (default: profile/RECIPE-DIGEST).")
    ] = None,
    *,
    script: Sequence[str] = (),
    as_json: bool = False,
    progress: Progress = SILENT,
) -> Profile:
    """Show where the time of a few training steps goes.

    After `--` comes the command of any PyTorch training script, which is not edited and ends after
    these steps. A recipe is profiled with `flatout profile my.yaml`.

    The steps are those of training, after warm-up and compilation, without evaluations and saves.
    The trace opens in Perfetto. The table shows kernels by class with their share of the time. On a
    GPU, torch's memory snapshot is written as well. Nothing is saved but the profile.

    Raises: UsageError before anything is measured; OutOfMemory; RunFailed when the disk is full.
    """
    if steps > MOST_STEPS:
        raise UsageError(
            f"--steps {steps}: the operations of that many steps may not fit in memory.",
            fix=f"Profile at most {MOST_STEPS} steps. A few show the same.",
        )
    require_local(out or "", "--out ")
    require_one("profile", script, recipe, overrides)
    if recipe is None:
        from flatout.measure.profile.profile import profile_script

        return profile_script(script, steps=steps, skip=skip, out=out, as_json=as_json)
    config = load_checked(recipe, overrides)
    from flatout.measure.profile.profile import run_profile

    return run_profile(config, steps=steps, skip=skip, out=out, progress=progress)


COMMAND = Command(
    profile,
    example="flatout profile -- python train.py",
    writes_files=True,
    is_timed=True,
)
