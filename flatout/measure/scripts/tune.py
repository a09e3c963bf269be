"""Finds the changes that make a script faster, proves the gain, and writes them as a patch.

Trials run in a copy of the script's directory. In the end, the patched files race against the
original ones: that alone is what is claimed.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.assembly.speedup import Tolerance
from flatout.distributed.spinning import say_if_busy
from flatout.errors import RunFailed, in_shell
from flatout.measure.attach.request import Answer, Request, Timing
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.diagnose.script import evidence_in
from flatout.measure.evidence import Evidence
from flatout.measure.moves import Move, Setting
from flatout.measure.output import claim, require_own
from flatout.measure.race import Race
from flatout.measure.results import (
    FILE,
    SUMMARY_FILE,
    ScriptTuning,
    facts_of,
    late_ones,
)
from flatout.measure.scripts.changes import CHANGES, edit_of
from flatout.measure.scripts.patch import Patch, apply, patch_of
from flatout.measure.scripts.scratch import Scratch, project_of
from flatout.measure.search import UNPROVEN, Search
from flatout.measure.trial import Result, run_command, try_command
from flatout.progress import SILENT, Progress
from flatout.storage.files import write_text, write_whole

LOOK_S, TRIAL_S = 3.0, 3.0
"""Seconds of steps with evidence, and of a trial."""
MIN_STEPS, MAX_STEPS, FEW_STEPS = 12, 400, 3
"""Steps of a trial that are timed. Where they are long, they are fewer than MIN_STEPS."""
TRIAL_SHARE = 0.025
"""Share of the time that those fewer steps may take."""
WARM_STEPS = 4
"""First steps of a trial, which are not timed: a third of the others, and at most these."""
UNCHANGED = Setting()


def tune_script(
    command: Sequence[str],
    *,
    out: Path | str | None = None,
    minutes: float = 10.0,
    only: Sequence[str] = (),
    patch: Path | str | None = None,
    progress: Progress = SILENT,
) -> ScriptTuning:
    """Find the changes that make a script faster, and write them as a patch.

    Raises: ConfigError when the directory is too large to be copied; RunFailed when the script
            takes no steps.
    """
    began_s, total_s = time.monotonic(), 60 * minutes
    is_asked, out = out is not None, Path(out or f"tuned-{name_of(command)}")
    require_own(out, is_own=(out / FILE).is_file())
    claim(Path(patch or out).parent)
    here = Path.cwd()
    with Scratch(project_of(here)) as scratch:
        say_if_busy(progress)
        with progress.task("Measuring the unchanged script"):
            look, evidence = looked_at(command, scratch, total_s)
            diagnosis = diagnosis_of(evidence)
        trials = Trials(command, scratch, timed_steps(evidence.step_s or 0.0, total_s))
        race = Race(trials.run, tolerance, total_s=total_s, loss_steps=1, is_strict=False,
                    longest_s=4 * (time.monotonic() - began_s) + 180, began_s=began_s)  # fmt: skip
        search = search_of(race, evidence, only)
        with race.running(progress, "Tuning the script"):
            base = race.run(UNCHANGED)
            if not base.is_ok:
                raise RunFailed(
                    f"A trial of the unchanged script failed: {base.reason}.",
                    fix="Run it alone first, twice: trials have no standard input, and start in a "
                    "copy of this directory.",
                )
            search.run()
        taken, found = [one.move.name for one in search.taken], dict[str, Any]()
        if taken:
            device = str(evidence.device).partition(":")[0]
            edits = {name: edit_of(name, device) for name in taken}
            trials.edits = patch_of(edits, look.sites, scratch.source)
            with race.running(progress, "Proving the patch"):
                found = proof_of(search, trials.edits)
    result = ScriptTuning(
        command=list(command),
        verdict=diagnosis.verdict,
        step_ms=1e3 * (evidence.step_s or 0.0),
        steps=trials.timing.steps + (trials.timing.warmup_steps or 0),
        changes=search.rows(),
        not_tried=search.left,
        taken=[one.move.name for one in search.taken],
        path=str(out) if search.taken or is_asked or out.exists() else "",
        root="" if scratch.source == here.resolve() else os.path.relpath(scratch.source),
        **facts_of(race) | found,
    )
    result = result.model_copy(update={"notes": notes(result)})
    if result.path:  # what nobody asked for is not left behind where nothing was found
        write_results(out, result, race, diagnosis)
    if patch is not None and result.patch:
        write_whole(Path(patch), result.patch)
    elif patch is not None:  # that of an earlier tune goes
        Path(patch).unlink(missing_ok=True)
        progress.say(f"There is no edit to make, so {patch} is not written.")
    return result


@dataclass
class Trials:
    """Runs a script with changes, or with patched files, in its copy."""

    command: Sequence[str]
    scratch: Scratch
    timing: Timing
    edits: Patch | None = None
    """What patches the files. A setting whose changes are in the files says so in its values."""

    def run(self, setting: Setting, seed: int, limit_s: float) -> Result:
        """Run a trial, and return the result."""
        self.scratch.reset()
        if setting.values and self.edits:
            apply(self.edits, self.scratch.path)
        timing = self.timing.model_copy(update={"seed_offset": seed})
        changes = [] if setting.values else sorted(setting.on, key=[*CHANGES].index)
        return try_command(self.command, timing, limit_s, folder=self.scratch.of(Path.cwd()),
                           changes=changes, copy=self.scratch)  # fmt: skip


def tolerance(one: Setting, other: Setting) -> Tolerance:
    """Return how far the losses of two settings of a script may differ."""
    rtol = sum(CHANGES[name].rtol for name in one.on ^ other.on)
    return Tolerance.rounding(rtol=rtol) if rtol else Tolerance.exact()


def search_of(race: Race, evidence: Evidence, only: Sequence[str]) -> Search:
    """Return the search among the changes that are worth a trial, or the named ones."""
    reasons = {name: one.why_not(evidence) for name, one in CHANGES.items()}
    names = list(only) or [name for name, why in reasons.items() if why is None]

    moves = [Move(name, frozenset({name}), does=CHANGES[name].does) for name in names]
    search = Search(race, UNCHANGED, moves, start_name="the unchanged script", proves_alone=False)
    for name, why in reasons.items():
        if why and name not in names:
            search.leave(name, why)
    return search


def proof_of(search: Search, edits: Patch) -> dict[str, Any]:
    """Race the patched files, and what no patch can express, against the unchanged script."""
    race, found = search.race, dict[str, Any](patch=edits.diff, by_hand=edits.by_hand)
    patched = search.best.but({"files": "patched"})
    points = {"verified": patched} if edits.diff else {}
    if edits.by_hand:  # the patch is not all of it
        points = {"gain": search.best} | points
    reasons: dict[str, str] = {}
    for key, point in points.items():
        race.note(search.name(point))
        if why := search.prove(point, UNCHANGED):
            reasons[key] = why
        if gain := race.gain(point, UNCHANGED):
            found |= {key: gain, f"{key}_losses": race.check(point, UNCHANGED)}
    if not edits.by_hand:
        found |= {"gain": found.get("verified"), "gain_losses": found.get("verified_losses")}
    for reason in [*reasons.values()][:1]:
        found |= {"patch": "", "withheld": f"No patch is written: {reason}."}
        if next(iter(points)) in reasons:
            found |= {"by_hand": [], "gain": None, "gain_losses": None}
            while search.taken:
                search.step_back(f"in the end, {reason}")
    return found


def notes(found: ScriptTuning) -> list[str]:
    """Return what was found in all, and how to use it."""
    unproven = [row for row in found.changes if UNPROVEN in (row.reason or "")]
    if found.gain:
        kept = found.gain_losses and found.gain_losses.words()
        lines = [f"Together: {found.gain.times()}{f'; losses {kept}' if kept else ''}."]
    elif found.taken:
        product = math.prod(row.gain.median for row in found.changes if row.taken and row.gain)
        lines = [f"Together: about {product:.2f} times as fast, the product of the gains."]
    elif unproven:
        best = max(unproven, key=lambda row: row.first_gain or 0.0)
        lines = [f"{best.name} may be faster, which is {UNPROVEN}. Add --minutes."]
    elif found.changes:
        lines = ["Nothing that was measured makes the script faster."]
    else:
        lines = ["No change was measured."]
    lines += late_ones(found.not_tried)
    lines += [found.withheld] if found.withheld else []
    if found.patch:
        proof = f"The patched script: {found.verified.times()}." if found.verified else ""
        lines += ["", found.patch.rstrip(), "", proof]
        file = f"{found.path}/changes.patch"
        git = f"git -C {in_shell(found.root)} apply" if found.root else "git apply"
        lines.append(f"Apply it: {git} {in_shell(os.path.abspath(file) if found.root else file)}")
    for one in found.by_hand:
        where = f"{one.file}:{one.line}: " if one.file else ""
        lines.append(f"By hand, {one.change}: {where}{one.words}")
    if found.taken:
        command = " ".join(map(in_shell, found.command))
        lines.append(f"Without editing: flatout run --with {','.join(found.taken)} -- {command}")
    where = f"; {found.path}/" * bool(found.path)
    return [*lines, f"{found.trials}{where}"]


def looked_at(command: Sequence[str], scratch: Scratch, limit_s: float) -> tuple[Answer, Evidence]:
    """Return what the unchanged script shows, in its copy.

    Raises: RunFailed when it fails, or takes too few steps.
    """
    ran = run_command(
        [scratch.inside(word) for word in command],
        Request(seconds=LOOK_S, copy_of_user=str(scratch.path)),
        folder=scratch.of(Path.cwd()),
        is_captured=True,
        limit_s=limit_s,
        environment=scratch.environment(),
    )
    look = Answer.model_validate_json(scratch.original(ran.answer.model_dump_json()))
    ran, name = ran._replace(answer=look), " ".join(command)
    if look.evidence is None or ran.failure is not None:
        print(scratch.original(ran.output), file=sys.stderr)
    if "EOFError" in ran.output.rpartition("\n")[2]:
        fix = "Give its answers as arguments: trials have no standard input."
        raise RunFailed(f"`{name}` reads from standard input.", fix=fix)
    evidence = evidence_in(name, ran)
    if evidence.failure is not None or not evidence.step_s:
        why = evidence.failure.message if evidence.failure else "it cannot be measured"
        raise RunFailed(f"`{name}` fails: {why}.", fix="Repair that first.")
    return look, evidence


def timed_steps(step_s: float, total_s: float) -> Timing:
    """Return the steps of a trial that are timed: fewer where they are long."""
    few = max(FEW_STEPS, round(TRIAL_SHARE * total_s / step_s))
    steps = max(min(MIN_STEPS, few), min(round(TRIAL_S / step_s), MAX_STEPS))
    return Timing(steps=steps, warmup_steps=min(WARM_STEPS, steps // 3))


def name_of(command: Sequence[str]) -> str:
    """Return the name of the script in a command."""
    scripts = [word for word in command if word.endswith(".py")] or command[-1:]
    return Path(scripts[0]).stem or "script"


def write_results(out: Path, result: ScriptTuning, race: Race, diagnosis: Diagnosis) -> None:
    """Write tuning.json, changes.patch, and the losses and step times before and after."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / FILE, result.model_dump_json(indent=1) + "\n")
    (out / "changes.patch").unlink(missing_ok=True)
    if result.patch:
        write_text(out / "changes.patch", result.patch)
    for name, on in (("before", frozenset[str]()), ("after", frozenset(result.taken))):
        (out / name).mkdir(exist_ok=True)
        records = [
            {"step": step, "train/loss": loss, "perf/step_ms": 1e3 * step_s}
            for one in race.results(Setting(on))[-1:]
            for step, (loss, step_s) in enumerate(zip(one.losses[1:], one.step_s, strict=False), 2)
        ]
        events = [{"event": "speedup", "name": n, "on": n in on} for n in result.taken]
        for file, lines in (("metrics.jsonl", records), ("events.jsonl", events)):
            write_text(out / name / file, "".join(f"{json.dumps(line)}\n" for line in lines))
    diagnosis.write(out / "before")
    write_text(out / "after" / SUMMARY_FILE, result.summary() + "\n")
