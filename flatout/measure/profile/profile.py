"""Profiles some steps of a recipe or a script: trace, kernels by class, what the device waits for.

The steps are recorded in the process of the command that takes them, with evaluations and saves of
a recipe omitted.
"""

from __future__ import annotations

import gzip
import json
import math
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from flatout.assembly.choices import parts_of
from flatout.config.schema import RunConfig
from flatout.display import terminal_text
from flatout.errors import RunFailed
from flatout.hardware.machine import fingerprint
from flatout.measure.attach.request import Recording, Request
from flatout.measure.attach.trace import Trace, document_in, read_trace
from flatout.measure.diagnose.script import evidence_in
from flatout.measure.output import claim
from flatout.measure.profile.result import Profile
from flatout.measure.resolving import resolve_apart
from flatout.measure.trial import (
    QUIET,
    Ran,
    require_one_process,
    run_command,
    run_recipe,
)
from flatout.progress import SILENT, Progress, counted
from flatout.storage.files import CheckedFile, write_text, writing_run
from flatout.training.run_dir.resume import run_name

PROFILES = Path("profile")
"""Where profiles are written without `--out`."""
FIGURES, TEXT, TRACE = "profile.json", "profile.txt", "trace.json.gz"
SNAPSHOT = "memory-snapshot.pickle"
"""torch's own file, for pytorch.org/memory_viz, which flatout never reads."""
WARM_STEPS = 21
"""Most steps of a warm-up without `--skip`, with the first."""
COLUMNS = 80
"""Columns of profile.txt."""
NOT_PERMITTED = (
    "The driver shows no kernels: it reserves profiling for administrators. Step times and "
    "the trace of the host are complete. The table and the device's gaps are missing. Allow it "
    "with the driver option NVreg_RestrictProfilingToAdminUsers=0, or in a container with "
    "--cap-add=SYS_ADMIN."
)


def run_profile(
    requested: RunConfig,
    *,
    steps: int = 3,
    skip: int | None = None,
    out: Path | str | None = None,
    cache: Path | None = None,
    progress: Progress = SILENT,
) -> Profile:
    """Profile some steps of a recipe, write the files to a directory, and return the profile.

    `skip` are the steps before them. None means until nothing is compiled any more.

    Raises: UsageError before anything is measured; OutOfMemory; RunFailed when the files cannot be
            written.
    """
    require_one_process("profile")
    out = Path(out or PROFILES / run_name(requested))
    resolved = resolve_apart(requested.with_values(QUIET), cache, progress)
    config = long_enough(resolved.stated(), steps, skip)
    with recorded_to(out, steps, skip) as (request, scratch):
        with progress.task(f"Profiling {steps} steps"):
            ran = run_recipe(config, scratch / "run", request, math.inf)
        if ran.answer.recorded is None:
            raise ran.error("Profiling")
        device = ran.answer.recorded.device
        return written(
            ran,
            request,
            out,
            recipe=config.name,
            arithmetic=parts_of(resolved.config).arithmetic(device),
            speedups=tuple(resolved.speedups),
        )


def profile_script(
    command: Sequence[str],
    *,
    steps: int = 3,
    skip: int | None = None,
    out: Path | str | None = None,
    as_json: bool = False,
) -> Profile:
    """Profile some steps of a script, which ends after them, as `run_profile`.

    Raises: ConfigError when the command does not exist; RunFailed when nothing was recorded.
    """
    name = shlex.join(command)
    file = next((word for word in command if word.endswith(".py")), command[0])
    out = Path(out or PROFILES / Path(file).stem)
    with recorded_to(out, steps, skip) as (request, _):
        ran = run_command(command, request, as_json=as_json)
        if ran.answer.recorded is None:
            if ran.answer.failure is None and (took := ran.answer.steps):
                raise RunFailed(
                    f"`{name}` took {counted(took + 1, 'step')}, which are too few.",
                    fix="Let it train for longer, or use a smaller --skip or --steps.",
                )
            evidence_in(name, ran)  # raises, as nothing was measured
        return written(ran, request, out, recipe=name)


@contextmanager
def recorded_to(out: Path, steps: int, skip: int | None) -> Iterator[tuple[Request, Path]]:
    """Claim a directory for a profile, and yield what to ask for, and a directory for the run."""
    claim(out)
    try:
        with writing_run(out), tempfile.TemporaryDirectory(dir=out, prefix=".steps-") as name:
            scratch = Path(name).resolve()
            files = {"trace": str(scratch / "raw.json"), "snapshot": str(scratch / SNAPSHOT)}
            yield Request(recording=Recording(steps=steps, skip=skip, **files)), scratch
    finally:
        with suppress(OSError):
            out.rmdir()  # fails unless it is empty


def long_enough(config: RunConfig, steps: int, skip: int | None) -> RunConfig:
    """Return the configuration with enough steps for a profile.

    On a GPU, one more step is for the memory.
    """
    last = WARM_STEPS + 2 * steps + 2 if skip is None else skip + steps + 1
    return config.with_values({"train.steps": max(config.train.steps or 0, last)})


def written(ran: Ran, request: Request, out: Path, **known: Any) -> Profile:
    """Write the files of a profile, and return it.

    Raises: RunFailed when the profiler could not write its trace.
    """
    found, asked = ran.answer.recorded, request.recording
    assert found is not None
    assert asked is not None
    raw, has_snapshot = Path(asked.trace), Path(asked.snapshot).exists()
    if has_snapshot:
        Path(asked.snapshot).replace(out / SNAPSHOT)
    profile = Profile(
        path=str(out),
        trace=str(out / TRACE) if raw.exists() else None,
        snapshot=str(out / SNAPSHOT) if has_snapshot else None,
        device=found.device,
        environment=fingerprint(found.device),
        first_step=found.first_step,
        steps=asked.steps,
        step_ms=found.step_s and 1e3 * found.step_s,
        profiled_step_ms=1e3 * found.seconds / asked.steps,
        notes=found.notes,
        **known,
    )
    if raw.exists():
        document = document_in(raw)
        packed = gzip.compress(json.dumps(document).encode(), compresslevel=6)
        with CheckedFile(out / TRACE) as file:
            file.write(np.frombuffer(packed, np.uint8))
        profile = with_trace(profile, read_trace(document, steps=asked.steps))
    write_text(out / FIGURES, profile.model_dump_json(indent=1) + "\n")
    write_text(out / TEXT, terminal_text(profile.display(), COLUMNS) + "\n")
    return profile


def with_trace(profile: Profile, trace: Trace) -> Profile:
    """Return a profile with what its trace shows."""
    if profile.device != "cpu" and not trace.kernels:
        return profile.model_copy(update={"notes": (*profile.notes, NOT_PERMITTED)})
    table = trace.table()
    busy_s = trace.busy_s() or sum(row.seconds for row in table)
    outside_ms = max(profile.profiled_step_ms - 1e3 * busy_s, 0.0)
    return profile.model_copy(update={"table": table, "outside_ms": outside_ms})
