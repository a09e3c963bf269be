"""Select the speedups of a run, given the configuration and the machine, and say why.

A speedup is on if the configuration names it. Under `auto`, the default in the speedup's file
decides, unless `bench` measured otherwise on this hardware (`flatout.assembly.auto`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flatout.assembly.auto import all_speedups, decide, default_of, overrides
from flatout.assembly.parts import Decision, Precision
from flatout.assembly.recipe import On, Recipe, Speedup, baseline, both_fill
from flatout.assembly.request import Request, adding, mentions, parse_request, removing
from flatout.config.schema import RunConfig
from flatout.errors import ConfigError, HardwareError
from flatout.hardware import Machine
from flatout.registry import SPEEDUPS

if TYPE_CHECKING:
    from flatout.assembly.prediction import Gain


def speedup_named(name: str) -> Speedup:
    """Return the speedup `name`; a custom one is named by its `package.module:attribute`.

    Raises: ConfigError that suggests the nearest name when there is none.
    """
    found: Speedup = SPEEDUPS.get(name)
    return replace(found, name=name) if ":" in name else found


def providers() -> dict[str, list[str]]:
    """Return the speedups that provide each train.precision but fp32, preferred ones first.

    If several can run, the last one on the ladder is preferred.
    """
    found: dict[str, list[str]] = {}
    for speedup in reversed(all_speedups()):
        precision = speedup.fills.get("precision")
        if isinstance(precision, Precision):
            found.setdefault(precision.name, []).append(speedup.name)
    return found


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
    request = _with_precision(parse_request(config.speedups), config, machine)
    chosen = _Selection(config, machine, device, request, minutes, measured or {})
    for adjust in (
        chosen.free_slots,
        chosen.drop_without_partner,
        chosen.yield_to_better,
        chosen.check_needs,
    ):
        adjust()
    return chosen.decisions


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


def _with_precision(request: Request, config: RunConfig, machine: Machine) -> Request:
    """Return the request with train.precision's speedup named and its rivals dropped.

    Raises: ConfigError when train.precision and `speedups` contradict each other.
    """
    precision = config.train.precision
    if precision == "auto":
        return request
    by_precision = providers()
    able_to = by_precision.get(precision, [])
    if precision != "fp32" and not able_to:
        raise ConfigError(
            f"No speedup provides train.precision={precision}.", fix="Set train.precision=auto."
        )
    every = [name for names in by_precision.values() for name in names]
    contrary = [name for name in request.named if name in every and name not in able_to]
    if contrary:
        meant = next(key for key, names in by_precision.items() if contrary[0] in names)
        raise ConfigError(
            f"train.precision={precision} and speedups={contrary[0]} contradict each other.",
            fix=f"Set train.precision={meant}, or leave {contrary[0]!r} out of speedups.",
        )
    named = [name for name in able_to if name in request.named]
    if able_to and not named:
        named = [_provider(able_to, request, config, machine)]
    others = tuple(name for name in every if name not in named)
    return Request(
        request.auto,
        tuple(dict.fromkeys([*request.named, *named])),
        request.dropped + others,
    )


def _provider(able_to: Sequence[str], request: Request, config: RunConfig, machine: Machine) -> str:
    """Return the speedup that provides train.precision, of which none is named.

    Prefer one that a named speedup needs, then one that can run.

    Raises: ConfigError when `speedups` leaves out all of them, or all that can run.
    """

    def runs(name: str) -> bool:
        return speedup_named(name).reason_against(machine, config) is None

    needed = {need for name in request.named for need in speedup_named(name).needs}
    allowed = [name for name in able_to if name not in request.dropped]
    best = min(allowed, key=lambda name: (name not in needed, not runs(name)), default=None)
    if best is not None and (runs(best) or not any(map(runs, {*able_to} - {*allowed}))):
        return best
    left_out = next((name for name in able_to if runs(name)), able_to[0])
    raise ConfigError(
        f"train.precision={config.train.precision} needs the speedup {left_out!r}, which speedups "
        "leaves out.",
        fix=f"Set train.precision=auto, or speedups={removing(left_out, config.speedups)}.",
    )


def _without(name: str, config: RunConfig) -> str:
    """Return the setting that leaves out `name`, from speedups or from train.precision."""
    if mentions(name, config.speedups):
        return f"speedups={removing(name, config.speedups)}"
    return "train.precision=auto"


def _taken_by(rival: str, *, named: bool = True) -> str:
    how = "was named" if named else "measured faster here"
    return f"{rival}, which {how}, takes its place"


@dataclass
class _Selection:
    """The decisions on all speedups, made independently first, then adjusted to each other."""

    config: RunConfig
    machine: Machine
    device: str
    request: Request
    minutes: float | None
    measured: Mapping[str, Gain]

    def __post_init__(self) -> None:
        self.speedups = {speedup.name: speedup for speedup in known_speedups(self.request.named)}
        self.decisions = [self._decide_one(speedup) for speedup in self.speedups.values()]

    def _decide_one(self, speedup: Speedup) -> Decision:
        name, request = speedup.name, self.request
        if name in request.named:
            if against := speedup.reason_against(self.machine, self.config):
                raise HardwareError(
                    f"The speedup {name!r} cannot be used: {against}",
                    fix=f"Leave it out: {_without(name, self.config)}.",
                )
            return Decision(name, True, "requested")
        if name in request.dropped:
            by_user = mentions(name, self.config.speedups)
            precision = f"train.precision={self.config.train.precision}"
            return Decision(name, False, "left out by speedups" if by_user else precision)
        if not request.auto:
            return Decision(name, False, "not among speedups")
        if against := speedup.reason_against(self.machine, self.config):
            return Decision(name, False, against)
        return decide(speedup, self.device, self.minutes, self.measured.get(name))

    @property
    def _on(self) -> set[str]:
        return {decision.name for decision in self.decisions if decision.on}

    def _turn_off(self, reasons: Mapping[str, str]) -> None:
        self.decisions = [
            Decision(d.name, False, reasons[d.name]) if d.name in reasons else d
            for d in self.decisions
        ]

    def _default(self, name: str) -> On:
        """Return the conditions of a speedup that is on; a named one has none."""
        default = default_of(self.speedups[name], self.device)
        return default if isinstance(default, On) and name not in self.request.named else On()

    def free_slots(self) -> None:
        """Turn off speedups whose slots go to one that was named or that measured faster here.

        Two named speedups for one slot are refused. Of two that measured faster than the default,
        the one with the larger gain stays.
        """
        taken: dict[str, str] = {}
        for name in self.request.named:
            for slot in self.speedups[name].fills:
                first = taken.setdefault(slot, name)
                if first != name:
                    ways = f": {_without(name, self.config)} or {_without(first, self.config)}"
                    raise both_fill(first, name, slot, ways)
        for name in self._measured_on():
            if not taken.keys() & self.speedups[name].fills.keys():
                taken |= dict.fromkeys(self.speedups[name].fills, name)
        rivals = {
            name: taken[slot]
            for name in self._on - {*self.request.named}
            for slot in reversed([*self.speedups[name].fills])
            if taken.get(slot, name) != name
        }
        self._turn_off(
            {
                name: _taken_by(rival, named=rival in self.request.named)
                for name, rival in rivals.items()
            }
        )

    def _measured_on(self) -> list[str]:
        """Return the speedups that are on only because they measured faster, largest gain first."""
        found = [
            name
            for name in self._on - {*self.request.named}
            if not isinstance(default_of(self.speedups[name], self.device), On)
            and overrides(self.speedups[name], self.measured.get(name))
        ]
        return sorted(found, key=lambda name: (-self.measured[name].gain, name))

    def drop_without_partner(self) -> None:
        """Turn off defaults that need one of several other speedups, if none of those is on."""
        on, reasons = self._on, {}
        for name in on:
            others = self._default(name).with_any
            if others and not on.intersection(others):
                reasons[name] = f"it is only for runs with {' or '.join(others)}"
        self._turn_off(reasons)

    def yield_to_better(self) -> None:
        """Turn off defaults that yield to another speedup, if that one is on."""
        on = self._on

        def better(name: str) -> str | None:
            """Return the speedup to which `name` yields, and which does not yield itself."""
            others = self._default(name).unless
            return next((one for one in others if one in on and better(one) is None), None)

        found = {name: better(name) for name in on}
        self._turn_off({name: f"{one} is on and replaces it" for name, one in found.items() if one})

    def check_needs(self) -> None:
        """Turn off speedups that need one that is off; refuse them if they were named."""
        on, reasons = self._on, {}
        for decision in self.decisions:
            missing = [need for need in self.speedups[decision.name].needs if need not in on]
            if decision.on and missing:
                if decision.name in self.request.named:
                    raise self._missing_need(decision.name, speedup_named(missing[0]))
                reasons[decision.name] = f"needs {missing[0]}, which is off"
        self._turn_off(reasons)

    def _missing_need(self, name: str, need: Speedup) -> ConfigError:
        """Return the error for a named speedup that needs one that is off, with the fix."""
        config = self.config
        reasons = {decision.name: decision.reason for decision in self.decisions}
        reason = reasons.get(need.name, "not among speedups")
        rival = next(
            (
                other
                for other in self.request.named
                if other != name and self.speedups[other].fills.keys() & need.fills.keys()
            ),
            None,
        )
        precision = need.fills.get("precision")
        brings = precision.name if isinstance(precision, Precision) else None
        leave_out = f"leave {name} out: {_without(name, config)}"
        if need.reason_against(self.machine, config):
            fix = f"{leave_out[0].upper()}{leave_out[1:]}."
        elif brings and config.train.precision not in ("auto", brings):
            fix = f"Set train.precision={brings}, or {leave_out}."
        elif rival:
            reason = _taken_by(rival)
            instead = adding(removing(rival, config.speedups), [need.name])
            fix = f"Replace {rival} with {need.name}: speedups={instead}, or {leave_out}."
        else:
            added = adding(config.speedups, [need.name])
            fix = f"Add {need.name}: speedups={added}, or {leave_out}."
        return ConfigError(
            f"The speedup {name!r} needs {need.name!r}, which is off: {reason.rstrip('.')}.",
            fix=fix,
        )
