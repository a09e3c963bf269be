"""Finds the changes that make a script faster, proves the gain, and writes them as a patch.

Trials run in a copy of the script's directory. In the end, the patched files race against the
original ones: that alone is what is claimed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.assembly.recipe import Tolerance
from flatout.distributed.spinning import say_if_busy
from flatout.errors import ConfigError, OutputInUse, RunFailed
from flatout.hardware.machine import probe
from flatout.measure.diagnose.diagnosis import Diagnosis, diagnosis_of
from flatout.measure.race import LossCheck, Race, TimeIsUp
from flatout.measure.results import FILE, SUMMARY_FILE, UNPROVEN, Left, ScriptTuning
from flatout.measure.scripts.changes import CHANGES, edit_of
from flatout.measure.scripts.patch import Patch, apply, patch_of
from flatout.measure.scripts.request import Answer, Facts, Request, Site, Timing
from flatout.measure.scripts.run import evidence_in
from flatout.measure.scripts.scratch import Scratch
from flatout.measure.search import DIFFERENT, LATE, Search
from flatout.measure.steps.evidence import Evidence
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
INSTEAD = {"compile-each-block": "compile"}
"""Changes that are only tried where a different one fails or is not tried."""


@dataclass(frozen=True)
class Variant:
    """A script with some changes, or with patched files."""

    changes: tuple[str, ...] = ()
    is_patched: bool = False


@dataclass(frozen=True)
class ScriptMove:
    """A change of a script."""

    name: str
    speedup: str | None = None
    is_leaving_out: bool = False

    @property
    def does(self) -> str:
        """What it does, in a few words."""
        return CHANGES[self.name].does

    def apply(self, setting: Variant) -> Variant | None:
        """Return the script with one more change."""
        return None if self.name in setting.changes else Variant((*setting.changes, self.name))


@dataclass(frozen=True)
class ScriptSpace:
    """The changes of a script, as a search sees them."""

    names: Sequence[str]

    def moves(self, setting: Variant) -> list[ScriptMove]:
        """Return the changes to measure."""
        return [*map(ScriptMove, self.names)]

    def why_not(self, after: Variant, race: Race[Variant]) -> str | None:
        """Return why the last change is not worth a trial."""
        other = INSTEAD.get(after.changes[-1], "")
        can_do = other in self.names and race.results(Variant((other,)))
        return f"{other} could be measured." if can_do else None

    def further(self, before: Variant, after: Variant) -> ScriptMove | None:
        """Return None: a change is made once."""
        return None

    def tolerance(self, one: Variant, other: Variant) -> Tolerance:
        """Return how far the losses may differ."""
        rtol = sum(CHANGES[name].rtol for name in {*one.changes} ^ {*other.changes})
        return Tolerance.rounding(rtol=rtol) if rtol else Tolerance.exact()

    def name(self, setting: Variant) -> str:
        """Return the changes."""
        if setting.is_patched:
            return "the patched script"
        return ", ".join(setting.changes) or "the unchanged script"


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
    began_s = time.monotonic()
    out = writable(Path(out or f"tuned-{name_of(command)}"), patch)
    with Scratch(Path.cwd(), command) as scratch:
        say_if_busy(progress)
        with progress.task("Measuring the unchanged script"):
            look, evidence, facts = looked_at(command, scratch, 60 * minutes)
            diagnosis = diagnosis_of(evidence)
        reasons = {name: change.why_not(facts, evidence) for name, change in CHANGES.items()}
        tried = list(only) or [name for name, why in reasons.items() if why is None]
        timed = timed_steps(step_s := evidence.step_s or 0.0, 60 * minutes)
        timing = Timing(steps=timed, warmup_steps=min(WARM_STEPS, timed // 3))
        made: list[Patch] = []

        def start(variant: Variant, seed: int, limit_s: float) -> Result:
            scratch.reset()
            if variant.is_patched:
                apply(made[-1], scratch.path)
            seeded, changes = timing.model_copy(update={"seed_offset": seed}), variant.changes
            return try_command(command, seeded, limit_s, folder=scratch.path, changes=changes,
                               copy=scratch)  # fmt: skip

        race = Race[Variant](
            start,
            total_s=60 * minutes,
            longest_s=4 * (time.monotonic() - began_s) + 180,
            clock=time.monotonic,
            began_s=began_s,
        )
        search = Search(race, ScriptSpace(tried), Variant(), loss_steps=1, is_strict=False,
                        proves_alone=False)  # fmt: skip
        found: dict[str, Any] = {}
        with race.running(progress, "Tuning the script"):
            base = race.run(Variant())
            if not base.is_ok:
                raise RunFailed(
                    f"A trial of the unchanged script failed: {base.reason}.",
                    fix="Run it alone first, twice: trials have no standard input, and start in a "
                    "copy of this directory.",
                )
            search.run()
        with race.running(progress, "Proving the patch"):
            device = str(evidence.device).partition(":")[0]
            found = proof_of(search, look.sites, device, scratch.source, made)
        scratch.reset()
        changed = [name for name in scratch.written if not made or name not in made[-1].files]
    result = ScriptTuning(
        command=list(command),
        machine=probe().describe(),
        verdict=diagnosis.verdict,
        step_ms=1e3 * step_s,
        steps=timed + (timing.warmup_steps or 0),
        changes=search.rows(),
        not_tried=[
            *(Left(name=n, reason=w) for n, w in reasons.items() if w and n not in tried),
            *search.left,
        ],
        taken=[one.move.name for one in search.taken],
        loss_noise=race.loss_noise(Variant()),
        written=changed,
        written_outside=[
            *dict.fromkeys([*look.writes, *(w for one in race.done for w in one.result.writes)])
        ],
        path=str(out),
        **race.facts(),
        **found,
    )
    write_results(out, result, race, diagnosis)
    write_patch(patch, result.patch, progress)
    return result


def proof_of(
    search: Search[Variant],
    sites: Sequence[Site],
    device: str,
    source: Path,
    made: list[Patch],
) -> dict[str, Any]:
    """Race the patched files, and what no patch can express, against the unchanged script."""
    race, taken = search.race, [one.move.name for one in search.taken]
    if not taken:
        return {}
    patch = patch_of({name: edit_of(name, device) for name in taken}, sites, source)
    made.append(patch)
    found: dict[str, Any] = {"patch": patch.diff, "by_hand": patch.by_hand}
    points = {"verified": Variant(is_patched=True)} if patch.diff else {}
    if patch.by_hand:  # the patch is not all of it
        points = {"gain": search.best} | points
    tolerance = search.space.tolerance(search.best, Variant())
    reasons: dict[str, str] = {}

    def check(point: Variant) -> LossCheck:
        return race.check(point, Variant(), tolerance, loss_steps=1, is_strict=False)

    for key, point in points.items():
        race.note(search.space.name(point))

        def is_open(point: Variant = point) -> bool:
            return check(point).within_tolerance is None

        try:
            failed = race.compare(point, Variant(), is_open=is_open)
        except TimeIsUp:
            failed = f"{race.stopped_by} {LATE}"
        gain, losses = race.gain(point, Variant()), check(point)
        if failed is not None or gain is None:
            reasons[key] = f"{UNPROVEN}: {failed}"
            continue
        found |= {key: gain, f"{key}_losses": losses}
        if (gain.low or 0.0) <= 1:
            is_slower = gain.high is not None and gain.high <= 1
            why = "it is not faster" if is_slower else f"its gain is {UNPROVEN}"
            reasons[key] = f"{why}, {gain.times()}"
        if losses.within_tolerance is False:
            reasons[key] = DIFFERENT
    if not patch.by_hand:
        found |= {"gain": found.get("verified"), "gain_losses": found.get("verified_losses")}
    if reasons:
        reason = next(iter(reasons.values()))
        found |= {"patch": "", "withheld": f"No patch is written: {reason}."}
        if next(iter(points)) in reasons:
            found |= {"by_hand": [], "gain": None, "gain_losses": None}
            while search.taken:
                search.step_back(f"in the end, {reason}")
    return found


def looked_at(
    command: Sequence[str], scratch: Scratch, limit_s: float
) -> tuple[Answer, Evidence, Facts]:
    """Return what the unchanged script shows, in its copy.

    Raises: RunFailed when it fails, or takes too few steps.
    """
    ran = run_command(
        [scratch.inside(word) for word in command],
        Request(seconds=LOOK_S, guarded=scratch.guarded),
        folder=scratch.path,
        is_captured=True,
        limit_s=limit_s,
    )
    look = Answer.model_validate_json(scratch.original(ran.answer.model_dump_json()))
    name, facts = " ".join(command), look.facts
    if look.evidence is None or look.evidence.failure is not None or (ran.code or 0) > 0:
        print(scratch.original(ran.output), file=sys.stderr)
    if "EOFError" in ran.output.rpartition("\n")[2]:
        fix = "Give its answers as arguments: trials have no standard input."
        raise RunFailed(f"`{name}` reads from standard input.", fix=fix)
    evidence = evidence_in(name, look, ran.code)
    if evidence.failure is not None or facts is None or not evidence.step_s:
        why = evidence.failure.message if evidence.failure else "it cannot be measured"
        raise RunFailed(f"`{name}` fails: {why}.", fix="Repair that first.")
    return look, evidence, facts


def writable(out: Path, patch: Path | str | None) -> Path:
    """Return the directory of the results, if it and the patch can be written.

    Raises: ConfigError when their directory is missing; OutputInUse when `out` is something else.
    """
    for path in (out, Path(patch or out)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(
                f"There is no directory {path.parent}.", fix="Create it, or name a different path."
            )
    if out.exists() and not (out / FILE).is_file() and (out.is_file() or any(out.iterdir())):
        raise OutputInUse(
            f"{out} exists and was not written by an earlier tune.", fix="Choose a different --out."
        )
    return out


def timed_steps(step_s: float, total_s: float) -> int:
    """Return the steps of a trial that are timed: fewer where they are long."""
    few = max(FEW_STEPS, round(TRIAL_SHARE * total_s / step_s))
    return max(min(MIN_STEPS, few), min(round(TRIAL_S / step_s), MAX_STEPS))


def name_of(command: Sequence[str]) -> str:
    """Return the name of the script in a command."""
    scripts = [word for word in command if word.endswith(".py")] or command[-1:]
    return Path(scripts[0]).stem or "script"


def write_patch(path: Path | str | None, text: str, progress: Progress) -> None:
    """Write a patch, or remove that of an earlier tune if there is no edit to make."""
    if path is not None and text:
        write_whole(Path(path), text)
    elif path is not None:
        Path(path).unlink(missing_ok=True)
        progress.say(f"There is no edit to make, so {path} is not written.")


def write_results(
    out: Path, result: ScriptTuning, race: Race[Variant], diagnosis: Diagnosis
) -> None:
    """Write tuning.json, changes.patch, and the losses and step times before and after."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / FILE, result.model_dump_json(indent=1) + "\n")
    (out / "changes.patch").unlink(missing_ok=True)
    if result.patch:
        write_text(out / "changes.patch", result.patch)
    for name, variant in (("before", Variant()), ("after", Variant(tuple(result.taken)))):
        (out / name).mkdir(exist_ok=True)
        records = [
            {"step": step, "train/loss": loss, "perf/step_ms": 1e3 * step_s}
            for one in race.results(variant)[-1:]
            for step, (loss, step_s) in enumerate(zip(one.losses[1:], one.step_s, strict=False), 2)
        ]
        events: Sequence[Mapping[str, Any]] = [
            {"event": "speedup", "name": n, "on": n in variant.changes} for n in result.taken
        ]
        for file, lines in (("metrics.jsonl", records), ("events.jsonl", events)):
            write_text(out / name / file, "".join(f"{json.dumps(line)}\n" for line in lines))
    diagnosis.write(out / "before")
    write_text(out / "after" / SUMMARY_FILE, result.summary() + "\n")
