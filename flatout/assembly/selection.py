"""Select the speedups of a run, given the configuration and the machine, and say why.

A speedup is on if the configuration names it. Under `auto`, the default in the speedup's file
decides, unless `bench` measured otherwise on this hardware. Of several for one slot, the first one
that can run is on: those that are named, then those that measured faster here, then the ladder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.assembly.parts import Decision, Gain, Precision
from flatout.assembly.recipe import Off, On, Recipe, Speedup, baseline, both_fill
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, HardwareError
from flatout.hardware import Machine
from flatout.registry import SPEEDUPS, unknown_name


@dataclass(frozen=True)
class Request:
    """The value of `config.speedups`, parsed."""

    auto: bool
    """Whether `auto` decides the speedups that are not listed."""
    named: tuple[str, ...]
    dropped: tuple[str, ...]

    def includes(self, name: str) -> bool:
        """Return whether a speedup is named, or may be chosen by `auto`."""
        return name in self.named or (self.auto and name not in self.dropped)


def parse_request(speedups: str | Sequence[str]) -> Request:
    """Parse auto, none, a list of names, or edits of auto such as `auto,-compile,+fused-adamw`.

    Raises: ConfigError for an unknown name, with the nearest one, or for a contradiction.
    """
    words = _words(speedups)
    named: list[str] = []
    dropped: list[str] = []
    auto = "auto" in words or any(word[0] in "+-" for word in words)
    for word in words:
        if word in ("auto", "none"):
            continue
        name = _name(word)
        _require_comma(word)
        if ":" not in name and name not in SPEEDUPS.names():
            raise unknown_name("speedup", name, [*SPEEDUPS.names(), "auto", "none"])
        (dropped if word.startswith("-") else named).append(name)
    if "none" in words and (auto or named):
        raise ConfigError(
            f"speedups={','.join(words)} asks for none and for others.",
            fix="Write none alone, or leave it out.",
        )
    both = next((name for name in named if name in dropped), None)
    if both:
        raise ConfigError(
            f"speedups={','.join(words)} asks for {both!r} and leaves it out.",
            fix=f"Write {both} once, with + or with -.",
        )
    return Request(auto, tuple(named), tuple(dropped))


def _require_comma(word: str) -> None:
    """Check that no comma is missing, as in `auto-compile`."""
    edit = word.removeprefix("auto")
    if edit != word and edit[0] in "+-":
        raise ConfigError(f"speedups has no comma in {word!r}.", fix=f"Write speedups=auto,{edit}.")


def adding(speedups: str | Sequence[str], names: Iterable[str]) -> str:
    """Return the request with `names` added and no longer left out."""
    added = list(names)
    sign = "+" if parse_request(speedups).auto else ""
    kept = [
        word for word in _words(speedups) if not (word.startswith("-") and _name(word) in added)
    ]
    return ",".join([*kept, *(sign + name for name in added)])


def removing(name: str, speedups: str | Sequence[str]) -> str:
    """Return the request without any mention of `name`."""
    kept = [word for word in _words(speedups) if _name(word) != name]
    still_edits = parse_request(kept).auto or not parse_request(speedups).auto
    return ",".join(kept if still_edits else ["auto", *kept]) or "none"


def mentions(name: str, speedups: str | Sequence[str]) -> bool:
    """Return whether the request mentions `name`, with or without a sign."""
    return name in map(_name, _words(speedups))


def _words(speedups: str | Sequence[str]) -> list[str]:
    return [
        word.strip()
        for word in (speedups.split(",") if isinstance(speedups, str) else speedups)
        if word.strip()
    ]


def _name(word: str) -> str:
    name = word.lstrip("+-")
    return name if ":" in name else name.replace("_", "-")


def speedup_named(name: str) -> Speedup:
    """Return the speedup `name`; a custom one is named by its `package.module:attribute`.

    Raises: ConfigError that suggests the nearest name when there is none.
    """
    found: Speedup = SPEEDUPS.get(name)
    return replace(found, name=name) if ":" in name else found


def all_speedups() -> list[Speedup]:
    """Return all built-in speedups in ladder order: by rank, then by name."""
    found = [SPEEDUPS.get(name) for name in SPEEDUPS.names()]
    return sorted(found, key=lambda speedup: (speedup.rank, speedup.name))


def default_of(speedup: Speedup, device: str) -> On | Off | None:
    """Return the default that a speedup's file states for `cpu` or `cuda`, or None.

    On MPS, for which no file states one, a speedup is on if it is on for CPUs and for GPUs.
    """
    if device == "mps":
        known = [speedup.auto.get("cpu"), speedup.auto.get("cuda")]
        return On() if all(isinstance(default, On) for default in known) else None
    return speedup.auto.get("cuda" if device.startswith("cuda") else "cpu")


def overrides(speedup: Speedup, gain: Gain | None) -> bool | None:
    """Return whether a gain measured here turns a speedup on or off; None leaves the default.

    The gain's interval must lie entirely above or below 1. A speedup with a statistical promise is
    never turned on: a measured rate says nothing about the loss.
    """
    if gain is None or not (gain.is_faster or gain.is_slower):
        return None
    if gain.is_faster and speedup.promise.kind == "statistical":
        return None
    return gain.is_faster


def decide(
    speedup: Speedup, device: str, minutes: float | None, gain: Gain | None = None
) -> Decision:
    """Decide a speedup that can run, for a run of `minutes` (None: unknown).

    `gain` is the one measured on this hardware, if any.
    """
    default, override = default_of(speedup, device), overrides(speedup, gain)
    if default is None and override is None:
        return Decision(speedup.name, False, "off unless named, because it has not been measured")
    reason = (default.because if default else None) or speedup.saves
    if override is not None and gain is not None:
        reason = f"measured here: {gain.describe()}"
    on = isinstance(default, On) if override is None else override
    least = default.from_minutes if default else 0
    if on and least and minutes is None:
        on = False
        reason = f"pays off from {least:g} minutes, and the run's duration is unknown: {reason}"
    elif on and minutes is not None and minutes < least:
        on = False
        reason = f"this run lasts about {minutes:.1f} minutes; pays off from {least:g}: {reason}"
    return Decision(speedup.name, on, reason)


def is_measured(speedup: Speedup, config: RunConfig, machine: Machine, device: str) -> bool | None:
    """Return whether a speedup's default is based on a measurement on this kind of device.

    Returns: None if it has no default because it cannot run there.
    """
    default = default_of(speedup, device)
    if default is None and speedup.reason_against(machine, config):
        return None
    return default is not None and default.measured


def longest_wait() -> float:
    """Return the longest `from_minutes` of the speedups that are on by default."""
    return max(
        (
            default.from_minutes
            for speedup in all_speedups()
            for default in speedup.auto.values()
            if isinstance(default, On)
        ),
        default=0,
    )


def assemble(decisions: Iterable[Decision]) -> Recipe:
    """Return the baseline recipe with all speedups that are on.

    Raises: ConfigError when two of them fill the same slot.
    """
    recipe = baseline()
    for decision in decisions:
        if decision.on:
            recipe = recipe.with_speedup(speedup_named(decision.name))
    return recipe


def select(
    config: RunConfig,
    machine: Machine,
    *,
    device: str = "cpu",
    minutes: float | None = None,
    measured: Mapping[str, Gain] | None = None,
) -> list[Decision]:
    """Decide on every speedup for a run on `device` of about `minutes` (None: unknown).

    `measured` contains the gains that `bench` measured on this hardware, by name.
    Raises: ConfigError when the request contradicts itself; HardwareError when a speedup that was
            named cannot run here.
    """
    request = with_precision(parse_request(config.speedups), config, machine)
    named, gains = request.named, measured or {}
    ladder = {speedup.name: speedup for speedup in known_speedups(named)}

    def decide_alone(speedup: Speedup) -> Decision:
        name = speedup.name
        if name not in named and name in request.dropped:
            if mentions(name, config.speedups):
                return Decision(name, False, "left out by speedups")
            return Decision(name, False, f"train.precision={config.train.precision}")
        if name not in named and not request.auto:
            return Decision(name, False, "not among speedups")
        against = speedup.reason_against(machine, config)
        if against and name in named:
            raise HardwareError(
                f"The speedup {name!r} cannot be used: {against}",
                fix=f"Leave it out: {_without(name, config)}.",
            )
        if against:
            return Decision(name, False, against)
        if name in named:
            return Decision(name, True, "requested")
        return decide(speedup, device, minutes, gains.get(name))

    found = {name: decide_alone(speedup) for name, speedup in ladder.items()}
    by_gain = [
        name
        for name in sorted(gains, key=lambda name: (-gains[name].gain, name))
        if name in found and found[name].on and not isinstance(default_of(ladder[name], device), On)
    ]
    taken: dict[str, str] = {}
    for name in dict.fromkeys([*named, *by_gain, *ladder]):
        fills = ladder[name].fills
        slot = next((slot for slot in fills if slot in taken), None)
        if not found[name].on:
            continue
        if slot is None:
            taken |= dict.fromkeys(fills, name)
        elif name in named:
            ways = f": {_without(name, config)} or {_without(taken[slot], config)}"
            raise both_fill(taken[slot], name, slot, ways)
        else:
            found[name] = Decision(name, False, _taken_by(taken[slot], named, by_gain))
    on = {name for name, decision in found.items() if decision.on}
    missing = {name: need for name in on for need in reversed(ladder[name].needs) if need not in on}
    for name in ladder:
        if name in missing and name in named:
            raise _missing_need(name, speedup_named(missing[name]), ladder, found, config, machine)
    for name, need in missing.items():
        found[name] = Decision(name, False, f"needs {need}, which is off")
    return [*found.values()]


def _taken_by(rival: str, named: Sequence[str], by_gain: Sequence[str] = ()) -> str:
    if rival in named:
        return f"{rival}, which was named, takes its place"
    if rival in by_gain:
        return f"{rival}, which measured faster here, takes its place"
    return f"{rival} is on and replaces it"


def _without(name: str, config: RunConfig) -> str:
    """Return the setting that leaves out `name`, from speedups or from train.precision."""
    if mentions(name, config.speedups):
        return f"speedups={removing(name, config.speedups)}"
    return "train.precision=auto"


def _missing_need(
    name: str,
    need: Speedup,
    ladder: Mapping[str, Speedup],
    found: Mapping[str, Decision],
    config: RunConfig,
    machine: Machine,
) -> ConfigError:
    """Return the error for a named speedup that needs one that is off, with the fix."""
    reason = found[need.name].reason if need.name in found else "not among speedups"
    named = with_precision(parse_request(config.speedups), config, machine).named
    rivals = (other for other in named if ladder[other].fills.keys() & need.fills.keys())
    rival = next((other for other in rivals if other != name), None)
    precision = need.fills.get("precision")
    brings = precision.name if isinstance(precision, Precision) else None
    leave_out = f"leave {name} out: {_without(name, config)}"
    if need.reason_against(machine, config):
        fix = f"{leave_out[0].upper()}{leave_out[1:]}."
    elif brings and config.train.precision not in ("auto", brings):
        fix = f"Set train.precision={brings}, or {leave_out}."
    elif rival:
        reason = _taken_by(rival, named)
        instead = adding(removing(rival, config.speedups), [need.name])
        fix = f"Replace {rival} with {need.name}: speedups={instead}, or {leave_out}."
    else:
        added = adding(config.speedups, [need.name])
        fix = f"Add {need.name}: speedups={added}, or {leave_out}."
    return ConfigError(
        f"The speedup {name!r} needs {need.name!r}, which is off: {reason.rstrip('.')}.",
        fix=fix,
    )


def stored_decisions(
    config: RunConfig, machine: Machine, *, requested: RunConfig | None = None
) -> list[Decision]:
    """Return the decisions stored in a resolved configuration; a resumed run makes no new ones.

    `requested` is the configuration that the run was started with; it shows whether the micro-batch
    was stated or chosen, and what chose it: the resolved one has only the rows.
    """
    on = parse_request(config.speedups).named
    before = "as when the run started"
    chooser = None
    if requested is not None and requested.batch.chooses_rows:
        chooser = parse_request(requested.speedups)
    decisions = []
    for speedup in known_speedups(on):
        against = speedup.reason_against(machine, config)
        reason = against or before
        is_on = speedup.name in on
        if is_on and against:
            reason = f"{before}; but now: {against}"
        if chooser is not None and "micro_batch" in speedup.fills:
            is_on |= chooser.includes(speedup.name)
            rows = config.batch.rows_per_device
            reason = (
                f"the micro-batch was chosen when the run started (batch.rows_per_device={rows})"
            )
        decisions.append(Decision(speedup.name, is_on, reason))
    return decisions


def known_speedups(named: Sequence[str]) -> list[Speedup]:
    """Return the built-in speedups in ladder order, then the custom ones that are named."""
    return all_speedups() + [speedup_named(name) for name in named if ":" in name]


def providers() -> dict[str, str]:
    """Return the train.precision that each speedup for it provides; the last on the ladder first.

    If several can run, that one is preferred.
    """
    found = {speedup.name: speedup.fills.get("precision") for speedup in reversed(all_speedups())}
    return {name: one.name for name, one in found.items() if isinstance(one, Precision)}


def with_precision(request: Request, config: RunConfig, machine: Machine) -> Request:
    """Return the request with train.precision's speedup named and its rivals dropped.

    Of several that provide it, one that a named speedup needs is preferred, then the last one on
    the ladder that can run.
    Raises: ConfigError when train.precision and `speedups` contradict each other.
    """
    wanted = config.train.precision
    if wanted == "auto":
        return request
    provides = providers()
    able = [name for name, precision in provides.items() if precision == wanted]
    if wanted != "fp32" and not able:
        raise ConfigError(
            f"No speedup provides train.precision={wanted}.", fix="Set train.precision=auto."
        )
    contrary = next((name for name in request.named if provides.get(name, wanted) != wanted), None)
    if contrary:
        raise ConfigError(
            f"train.precision={wanted} and speedups={contrary} contradict each other.",
            fix=f"Set train.precision={provides[contrary]}, or leave {contrary!r} out of speedups.",
        )
    named = [name for name in able if name in request.named]
    if able and not named:
        runs = [n for n in able if speedup_named(n).reason_against(machine, config) is None]
        needed = {need for name in request.named for need in speedup_named(name).needs}
        allowed = [name for name in able if name not in request.dropped]
        best = min(allowed, key=lambda name: (name not in needed, name not in runs), default="")
        if best not in runs and (not best or {*runs} - {*allowed}):
            left_out = [*runs, *able][0]
            raise ConfigError(
                f"train.precision={wanted} needs the speedup {left_out!r}, which speedups leaves "
                "out.",
                fix=f"Set train.precision=auto, or speedups={removing(left_out, config.speedups)}.",
            )
        named = [best]
    return Request(
        request.auto,
        tuple(dict.fromkeys([*request.named, *named])),
        request.dropped + tuple(name for name in provides if name not in named),
    )
