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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from flatout.config.schema import RunConfig
from flatout.hardware.machine import fingerprint
from flatout.measure.attach.request import Recording, Request
from flatout.measure.attach.trace import Trace, document_in, read_trace
from flatout.measure.diagnose.script import evidence_in
from flatout.measure.output import claim
from flatout.measure.profile.result import Profile
from flatout.measure.trial import (
    QUIET,
    Result,
    error_in,
    require_one_process,
    run_command,
    run_recipe,
)
from flatout.progress import SILENT, Progress
from flatout.storage.files import CheckedFile, write_text, writing_run
from flatout.training.run_dir.resume import run_name

PROFILES = Path("profile")
"""Where profiles are written without `--out`."""
FIGURES, TRACE = "profile.json", "trace.json.gz"
SNAPSHOT = "memory-snapshot.pickle"
"""torch's own file, for pytorch.org/memory_viz, which flatout never reads."""
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
    progress: Progress = SILENT,
) -> Profile:
    """Profile some steps of a recipe, write the files to a directory, and return the profile.

    `skip` are the steps before them. None means until nothing is compiled any more.

    Raises: UsageError before anything is measured; OutOfMemory; RunFailed when the run is too
            short, or the files cannot be written.
    """
    require_one_process("profile")

    def record(request: Request, scratch: Path) -> Result:
        with progress.task(f"Profiling {steps} steps"):
            return run_recipe(requested.with_values(QUIET), scratch / "run", request, math.inf)

    out = Path(out or PROFILES / run_name(requested))
    return recorded(requested.name, record, out, steps, skip)


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
    file = next((word for word in command if word.endswith(".py")), command[0])
    out = Path(out or PROFILES / Path(file).stem)

    def record(request: Request, _: Path) -> Result:
        return run_command(command, request, as_json=as_json)

    return recorded(shlex.join(command), record, out, steps, skip)


def recorded(
    what: str, record: Callable[[Request, Path], Result], out: Path, steps: int, skip: int | None
) -> Profile:
    """Record steps, with a directory for the run, write the files of the profile, and return it.

    Raises: RunFailed when nothing was recorded, or the profiler could not write its trace.
    """
    claim(out)
    try:
        with writing_run(out), tempfile.TemporaryDirectory(dir=out, prefix=".steps-") as made:
            scratch = Path(made).resolve()
            raw, snapshot = scratch / "raw.json", scratch / SNAPSHOT
            asked = Recording(steps=steps, skip=skip, trace=str(raw), snapshot=str(snapshot))
            ran = record(Request(recording=asked), scratch)
            found = ran.recorded
            if found is None:
                if error := error_in(ran.output):
                    raise error
                evidence_in(what, ran)  # raises, as nothing was measured
            assert found is not None
            profile = Profile(
                recipe=what,
                path=str(out),
                trace=str(out / TRACE) if raw.exists() else None,
                snapshot=str(out / SNAPSHOT) if snapshot.exists() else None,
                device=found.device,
                environment=fingerprint(found.device),
                first_step=found.first_step,
                steps=steps,
                step_ms=found.step_s and 1e3 * found.step_s,
                profiled_step_ms=1e3 * found.seconds / steps,
                notes=found.notes,
            )
            for name in (TRACE, SNAPSHOT):
                (out / name).unlink(missing_ok=True)  # those of an earlier profile
            if snapshot.exists():
                snapshot.replace(out / SNAPSHOT)
            if raw.exists():
                document = document_in(raw)
                packed = gzip.compress(json.dumps(document).encode(), compresslevel=6)
                with CheckedFile(out / TRACE) as file:
                    file.write(np.frombuffer(packed, np.uint8))
                profile = with_trace(profile, read_trace(document, steps=steps))
            write_text(out / FIGURES, profile.model_dump_json(indent=1) + "\n")
            return profile
    finally:
        with suppress(OSError):
            out.rmdir()  # fails unless it is empty


def with_trace(profile: Profile, trace: Trace) -> Profile:
    """Return a profile with what its trace shows."""
    if profile.device != "cpu" and not trace.kernels:
        return profile.model_copy(update={"notes": (*profile.notes, NOT_PERMITTED)})
    table = trace.table()
    busy_s = trace.busy_s() or sum(row.seconds for row in table)
    outside_ms = max(profile.profiled_step_ms - 1e3 * busy_s, 0.0)
    return profile.model_copy(update={"table": table, "outside_ms": outside_ms})
