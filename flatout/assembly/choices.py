"""Choose the speedups of a run, given the configuration and the machine, with the reasons.

A speedup is on if the configuration names it. Under `auto`, the default in the speedup's file
decides, unless `bench` measured otherwise on this hardware. Of several that set one part, the first
one that can run is on: those that are named, then those that measured faster here, then the rest by
rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.assembly.parts import Parts
from flatout.assembly.speedup import Off, On, Speedup
from flatout.config.registry import SPEEDUPS, unknown_name
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, HardwareError
from flatout.hardware.machine import Machine
from flatout.storage.files import Stored


@dataclass(frozen=True)
class Decision:
    """Whether a speedup is on, and why."""

    name: str
    on: bool
    reason: str


class Gain(Stored):
    """What a speedup gained in the last ablation that measured it."""

    gain: float
    """How many times faster training is with it."""
    low: float | None
    """Lower end of its 94% interval. Null with too few repeats."""
    high: float | None
    """Upper end."""
    where: str
    """What it was added to or removed from."""
    recipe: str
    """Recipe of that ablation."""
    date: str
    """When the ablation started."""
    commit: str | None
    """Commit of flatout. Null outside a checkout."""
    torch: str
    """Version of torch."""
    flops_per_token: float = 0.0
    """FLOPs per token of the model that it was measured with. 0 for earlier versions' gains."""

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval is above 1."""
        return self.low is not None and self.low > 1

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval is below 1."""
        return self.high is not None and self.high < 1

    def describe(self) -> str:
        """Return one line for a person."""
        spread = (
            "too few repeats to be sure"
            if self.low is None or self.high is None
            else f"{self.low:.2f} to {self.high:.2f}"
        )
        at = f", commit {self.commit}" if self.commit else ""
        return f"x{self.gain:.2f} ({spread}), {self.where} of {self.recipe}, {self.date[:10]}{at}"


@dataclass(frozen=True)
class Request:
    """The value of `config.speedups`, parsed."""

    auto: bool
    """Whether `auto` decides the speedups that are not listed."""
    named: tuple[str, ...]
    dropped: tuple[str, ...]


def parse_request(speedups: str | Sequence[str]) -> Request:
    """Parse auto, none, a list of names, or edits of auto such as `auto,-compile,+fused-adamw`.

    Raises: ConfigError for an unknown name, with the nearest one, or for a contradiction.
    """
    words = _words(speedups)
    asked = f"speedups={','.join(words)} asks for"
    named: list[str] = []
    dropped: list[str] = []
    auto = "auto" in words or any(word[0] in "+-" for word in words)
    for word in words:
        if word in ("auto", "none"):
            continue
        name, edit = _name(word), word.removeprefix("auto")
        if edit != word and edit[0] in "+-":
            raise ConfigError(
                f"speedups has no comma in {word!r}.", fix=f"Write speedups=auto,{edit}."
            )
        if ":" not in name and name not in SPEEDUPS.names():
            raise unknown_name("speedup", name, [*SPEEDUPS.names(), "auto", "none"])
        (dropped if word.startswith("-") else named).append(name)
    if "none" in words and (auto or named):
        raise ConfigError(f"{asked} none and for others.", fix="Write none alone, or remove it.")
    for name in named:
        if name in dropped:
            raise ConfigError(
                f"{asked} {name!r} and excludes it.",
                fix=f"Write {name} once, with + or with -.",
            )
    return Request(auto, tuple(named), tuple(dropped))


def adding(speedups: str | Sequence[str], names: Iterable[str]) -> str:
    """Return the request with `names` added and no longer excluded."""
    added = list(names)
    sign = "+" if parse_request(speedups).auto else ""
    words = (word for word in _words(speedups) if word != "none")
    kept = [word for word in words if word[0] != "-" or _name(word) not in added]
    return ",".join([*kept, *(sign + name for name in added)])


def removing(name: str, speedups: str | Sequence[str]) -> str:
    """Return the request without any mention of `name`."""
    kept = [word for word in _words(speedups) if _name(word) != name]
    still_edits = parse_request(kept).auto or not parse_request(speedups).auto
    return ",".join(kept if still_edits else ["auto", *kept]) or "none"


def _words(speedups: str | Sequence[str]) -> list[str]:
    parts = speedups.split(",") if isinstance(speedups, str) else speedups
    return [word for part in parts if (word := part.strip())]


def _name(word: str) -> str:
    name = word.lstrip("+-")
    return name if ":" in name else name.replace("_", "-")


def speedup_named(name: str) -> Speedup:
    """Return the speedup `name`. A custom one is named by its `package.module:attribute`.

    Raises: ConfigError that suggests the nearest name when there is none.
    """
    found: Speedup = SPEEDUPS.get(name)
    return replace(found, name=name) if ":" in name else found


def all_speedups(named: Iterable[str] = ()) -> list[Speedup]:
    """Return the built-in speedups by rank, and the custom ones among `named`."""
    found = map(speedup_named, SPEEDUPS.names())
    ranked = sorted(found, key=lambda speedup: (speedup.rank, speedup.name))
    return ranked + [speedup_named(name) for name in named if ":" in name]


def default_of(speedup: Speedup, device: str) -> On | Off | None:
    """Return the default that a speedup's file states for `cpu` or `cuda`, or None.

    On MPS, for which no file states one, a speedup is on if it is on for CPUs and for GPUs, and
    does not compile.
    """
    if device == "mps":
        known = [speedup.auto.get("cpu"), speedup.auto.get("cuda")]
        is_on = not speedup.compiles and all(isinstance(default, On) for default in known)
        return On() if is_on else None
    return speedup.auto.get("cuda" if device.startswith("cuda") else "cpu")


def memory_savers(device: str) -> list[str]:
    """Return the speedups that `auto` turns on when nothing fits, the cheapest first."""
    defaults = {speedup.name: default_of(speedup, device) for speedup in all_speedups()}
    short = [name for name, each in defaults.items() if isinstance(each, Off) and each.when_short]
    return short[::-1]


def decide(
    speedup: Speedup,
    device: str,
    minutes: float | None,
    gain: Gain | None = None,
    *,
    compile_cost: float = 1.0,
) -> Decision:
    """Decide a speedup that can run, for a run of `minutes` (None: unknown).

    `compile_cost` is the time of compiling relative to an idle machine: below 1 if the code of this
    run is in torch's cache, above 1 beside other processes.

    `gain` is the one measured on this hardware, if any. It decides if its interval lies entirely
    above or below 1, but turns on no speedup with a statistical tolerance: a measured rate shows
    nothing about the loss.
    """
    default = default_of(speedup, device)
    if gain and (gain.is_slower or (gain.is_faster and speedup.tolerance.kind != "statistical")):
        on, reason = gain.is_faster, f"measured here: {gain.describe()}"
    elif default is None:
        return Decision(speedup.name, False, "off unless named, because it has not been measured")
    else:
        on, reason = isinstance(default, On), default.because or speedup.saves
    least, busy = default.from_minutes if default else 0, ""
    if speedup.compiles:
        least = round(least * compile_cost, 1)
        if on and compile_cost < 1:
            reason = f"its code was compiled in an earlier run: {reason}"
        busy = " on a machine as busy as this one" if compile_cost > 1 else ""
    if on and least and minutes is None:
        on = False
        reason = f"pays off from {least:g} minutes, and the run's duration is unknown: {reason}"
    elif on and minutes is not None and minutes < least:
        on = False
        reason = (
            f"this run lasts about {minutes:.1f} minutes, and it pays off from {least:g}{busy}: "
            f"{reason}"
        )
    return Decision(speedup.name, on, reason)


def is_measured(speedup: Speedup, config: RunConfig, machine: Machine, device: str) -> bool | None:
    """Return whether a speedup's default is based on a measurement on this kind of device.

    Returns: None if it has no default because it cannot run there.
    """
    default = default_of(speedup, device)
    if default is None and speedup.reason_against(machine, config):
        return None
    return default is not None and default.measured


def assemble(names: Iterable[str]) -> Parts:
    """Return the parts of a run with the speedups of these names.

    Raises: ConfigError when two of them set the same part.
    """
    parts, taken = Parts(), dict[str, str]()
    for name in names:
        speedup = speedup_named(name)
        for part in speedup.sets:
            if part in taken:
                raise _both_set(taken[part], name, part)
        taken |= dict.fromkeys(speedup.sets, name)
        speedup.apply(parts)
    return parts.loaded()


def parts_of(config: RunConfig) -> Parts:
    """Return the parts of a resolved configuration, which names every speedup that is on."""
    return assemble(parse_request(config.speedups).named)


def speedups_for(part: str, names: Iterable[str] | None = None) -> list[str]:
    """Return those speedups of `names`, or of all, that set a part, in their order."""
    found = all_speedups() if names is None else map(speedup_named, names)
    return [speedup.name for speedup in found if part in speedup.sets]


def _both_set(first: str, second: str, part: str, fix: str = "") -> ConfigError:
    return ConfigError(
        f"The speedups {first!r} and {second!r} both set {part!r}.",
        fix=f"Remove one of the two{fix}.",
    )


def select(
    config: RunConfig,
    machine: Machine,
    *,
    device: str = "cpu",
    minutes: float | None = None,
    measured: Mapping[str, Gain] | None = None,
    compile_cost: float = 1.0,
) -> list[Decision]:
    """Decide on every speedup for a run on `device` of about `minutes` (None: unknown).

    `measured` contains the gains that `bench` measured on this hardware, by name. `compile_cost`
    is as in `decide`.
    Raises: ConfigError when the request contradicts itself; HardwareError when a speedup that was
            named cannot run here.
    """
    request, precision = parse_request(config.speedups), config.train.precision
    gains = measured or {}
    named, excluded = _with_precision(request, config, machine)
    by_name = {speedup.name: speedup for speedup in all_speedups(named)}
    alone: dict[str, Decision] = {}
    for name, speedup in by_name.items():
        against: str | None = "not among speedups"
        if name in request.dropped:
            against = "excluded by speedups"
        elif name in excluded:
            against = f"train.precision={precision}"
        elif request.auto or name in named:
            against = speedup.reason_against(machine, config)
        if against and name in named:
            raise HardwareError(
                f"The speedup {name!r} cannot be used: {against}",
                fix=f"Remove it: {_without(name, config)}.",
            )
        if name in named:
            alone[name] = Decision(name, True, "requested")
        elif against:
            alone[name] = Decision(name, False, against)
        else:
            alone[name] = decide(
                speedup, device, minutes, gains.get(name), compile_cost=compile_cost
            )
    faster = [
        name
        for name in sorted(alone.keys() & gains, key=lambda name: (-gains[name].gain, name))
        if alone[name].on and not isinstance(default_of(by_name[name], device), On)
    ]

    def lacks(name: str, found: Mapping[str, Decision]) -> Decision | None:
        """Return the decision against a speedup that is on without one that it needs, or None."""
        speedup, gain = by_name[name], gains.get(name)
        missing = [one for one in speedup.needs if one not in found or not found[one].on]
        if missing and name in named:
            rivals = [by_name[other] for other in named if other != name]
            raise _missing_need(name, found.get(missing[0]), missing[0], rivals, config, machine)
        if missing:
            return Decision(name, False, f"needs {missing[0]}, which is off")
        default = default_of(speedup, device)
        beside = default.beside if isinstance(default, On) else None
        if beside is None or name in named or (gain is not None and gain.is_faster):
            return None
        if beside in found and found[beside].on:
            return None
        return Decision(name, False, f"gains nothing without {beside}, which is off")

    while True:  # what drops out leaves its parts to others
        found, taken = dict(alone), dict[str, str]()
        for name in dict.fromkeys([*named, *faster, *by_name]):
            sets = by_name[name].sets if found[name].on else frozenset()
            rival = next((taken[part] for part in sets if part in taken), None)
            if rival is None:
                taken |= dict.fromkeys(sets, name)
                continue
            if name in named:
                part = next(part for part in sorted(sets) if part in taken)
                ways = f": {_without(name, config)} or {_without(rival, config)}"
                raise _both_set(rival, name, part, ways)
            reason = f"{rival} is on and replaces it"
            if rival in named:
                reason = f"{rival}, which was named, takes its place"
            elif rival in faster:
                reason = f"{rival}, which measured faster here, takes its place"
            found[name] = Decision(name, False, reason)
        off = next((no for name in by_name if found[name].on and (no := lacks(name, found))), None)
        if off is None:
            return [*found.values()]
        alone[off.name] = off


def _without(name: str, config: RunConfig) -> str:
    """Return the setting that excludes `name`, from speedups or from train.precision."""
    if name in parse_request(config.speedups).named:
        return f"speedups={removing(name, config.speedups)}"
    return "train.precision=auto"


def _missing_need(
    name: str,
    decision: Decision | None,
    missing: str,
    others: Iterable[Speedup],
    config: RunConfig,
    machine: Machine,
) -> ConfigError:
    """Return the error for a named speedup that needs one that is off, with a fix.

    `others` are the other named ones, of which one may take the place of the missing one.
    """
    reason = decision.reason if decision else "not among speedups"
    need, stated = speedup_named(missing), config.train.precision
    precision, asked = providers().get(missing), config.speedups
    fix = f"emove {name}: {_without(name, config)}."
    if need.reason_against(machine, config):
        fix = f"R{fix}"
    elif precision and stated not in ("auto", precision):
        fix = f"Set train.precision={precision}, or r{fix}"
    else:
        for rival in (other.name for other in others if other.sets & need.sets):
            reason = f"{rival}, which was named, takes its place"
            asked = removing(rival, asked)
        fix = f"Set speedups={adding(asked, [missing])}, or r{fix}"
    return ConfigError(
        f"The speedup {name!r} needs {missing!r}, which is off: {reason.rstrip('.')}.", fix=fix
    )


def stored_decisions(config: RunConfig, machine: Machine) -> list[Decision]:
    """Return the decisions stored in a resolved configuration. A resumed run makes no new ones."""
    on = parse_request(config.speedups).named
    decisions = []
    for speedup in all_speedups(on):
        is_on, against = speedup.name in on, speedup.reason_against(machine, config)
        reason = against or "as when the run started"
        if is_on and against:
            reason = f"as when the run started, but now: {against}"
        decisions.append(Decision(speedup.name, is_on, reason))
    return decisions


def providers() -> dict[str, str]:
    """Return the train.precision that each speedup for it provides, the last rank first.

    If several can run, that one is preferred.
    """
    found = dict[str, str]()
    for name in reversed(speedups_for("precision")):
        speedup_named(name).apply(parts := Parts())
        found[name] = parts.precision.name
    return found


def _with_precision(
    request: Request, config: RunConfig, machine: Machine
) -> tuple[Sequence[str], Iterable[str]]:
    """Return the named speedups with train.precision's, and those that it excludes.

    Of several that provide it, one that a named speedup needs is preferred, then the one with
    the last rank that can run.
    Raises: ConfigError when train.precision and `speedups` contradict each other.
    """
    wanted, provides, named = config.train.precision, providers(), request.named
    if wanted == "auto":
        return named, ()
    able = [name for name, precision in provides.items() if precision == wanted]
    if wanted != "fp32" and not able:
        raise ConfigError(
            f"No speedup provides train.precision={wanted}.", fix="Set train.precision=auto."
        )
    if contrary := next((name for name in named if provides.get(name, wanted) != wanted), None):
        raise ConfigError(
            f"train.precision={wanted} and speedups={contrary} contradict each other.",
            fix=f"Set train.precision={provides[contrary]}, or remove {contrary!r} from speedups.",
        )
    chosen = [name for name in able if name in named]
    if able and not chosen:
        runs = [n for n in able if speedup_named(n).reason_against(machine, config) is None]
        needed = {need for name in named for need in speedup_named(name).needs}
        allowed = [name for name in able if name not in request.dropped]
        best = min(allowed, key=lambda name: (name not in needed, name not in runs), default="")
        if best not in runs and (not best or {*runs} - {*allowed}):
            left_out = [*runs, *able][0]
            raise ConfigError(
                f"train.precision={wanted} needs the speedup {left_out!r}, which speedups "
                "excludes.",
                fix=f"Set train.precision=auto, or speedups={removing(left_out, config.speedups)}.",
            )
        chosen = [best]
    return [*dict.fromkeys([*named, *chosen])], provides.keys() - chosen
