"""Speedup: one file of flatout/speedups, and the checks that such files share.

Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

from flatout.assembly.parts import Parts
from flatout.config.registry import MODELS, SPEEDUPS
from flatout.config.schema import RunConfig
from flatout.errors import MissingPackage
from flatout.hardware.machine import Machine

Check = Callable[[Machine, RunConfig], str | None]
"""Returns one sentence on why a speedup cannot or should not run, or None."""
MODEL_OPS = frozenset({"attention", "heads", "linear", "scan"})
"""Ops that a model may or may not call. Its file states which, as USES."""


@dataclass(frozen=True)
class Tolerance:
    """How far a speedup may change the losses."""

    kind: Literal["exact", "rounding", "statistical"]
    rtol: float = 0.0
    """Largest relative difference between losses on the same batches, for rounding only."""

    @classmethod
    def exact(cls) -> Tolerance:
        """Bit-equal losses on the same batches.

        This holds wherever two runs of one command are bit-equal: on a GPU, with
        train.deterministic=true.
        """
        return cls("exact")

    @classmethod
    def rounding(cls, *, rtol: float) -> Tolerance:
        """Losses on the same batches differ by at most `rtol` in relative terms."""
        return cls("rounding", rtol)

    @classmethod
    def statistical(cls) -> Tolerance:
        """Different batches or arithmetic. The final loss is within the spread over seeds."""
        return cls("statistical")


@dataclass(frozen=True)
class On:
    """A default of `auto`: on, unless a speedup of a lower rank sets one of its parts."""

    because: str | None = None
    """The reason, in words. None means the speedup's `saves`."""
    from_minutes: float = 0
    """Shortest run for which it is on."""
    beside: str | None = None
    """A speedup without which it gains nothing, and is off."""
    measured: bool = False
    """Whether it is based on a measurement on this kind of device (LOG.md, docs/numbers.md) rather
    than on arithmetic and published measurements.
    """


@dataclass(frozen=True)
class Off:
    """A default of `auto`: off unless named, or measured faster on this hardware."""

    because: str
    """The reason, in words."""
    from_minutes: float = 0
    """Shortest run for which a measured gain turns it on."""
    measured: bool = False
    """See `On`."""
    when_short: bool = False
    """Whether `auto` turns it on when nothing fits the device without it."""


UNRANKED = 10_000
"""Rank of a speedup that states none: last."""


@dataclass(frozen=True)
class Speedup:
    """One speedup, defined in one file of flatout/speedups."""

    name: str
    """The file's name, with hyphens for underscores."""
    apply: Callable[[Parts], None]
    """Sets the parts that it replaces. Of two speedups that set one part, only one can be on."""
    saves: str
    """One line on what it saves."""
    tolerance: Tolerance
    """How far it may change the losses."""
    needs: tuple[str, ...] = ()
    """Speedups without which it does not work."""
    compiles: bool = False
    """Whether it uses torch.compile.

    Compiled code is called once before training. If that fails, every speedup that compiles is
    turned off.
    """
    why_not: Check = lambda _machine, _config: None
    """Returns one sentence on why it cannot or should not run here, or None. A separate check
    covers models that do not call the functions it replaces.
    """
    rank: int = UNRANKED
    """Position among the speedups. Equal ranks go by name.

    Of two defaults for one part, the first that can run is on. `bench` adds them in this order.
    """
    auto: Mapping[Literal["cpu", "cuda"], On | Off] = field(default_factory=dict)
    """Its default under `speedups=auto` on each device. Off if not stated."""

    @cached_property
    def sets(self) -> frozenset[str]:
        """The names of the parts that it sets."""
        changed, plain = Parts(), vars(Parts())
        self.apply(changed)
        return frozenset(name for name, value in vars(changed).items() if value != plain[name])

    def reason_against(self, machine: Machine, config: RunConfig) -> str | None:
        """Return why it cannot or should not run here, or None.

        The reason is an unknown speedup among its needs, a model that calls none of the functions
        it replaces, or the answer of `why_not`.
        """
        known, kind = SPEEDUPS.names(), config.model.kind
        for need in self.needs:
            if ":" not in need and need not in known:
                return f"It needs {need}, which is not among the speedups."
        used = MODELS.stated(kind, "USES")
        if used == () and (MODEL_OPS | {"cross_entropy"}) & self.sets:
            return f"The model {kind!r} calls none of the functions that it replaces."
        if self.compiles and config.batch.by_tokens:
            return "Code is compiled for a few shapes, and batch.by_tokens makes many."
        if used is not None and self.sets and self.sets <= MODEL_OPS - {*used}:
            return f"The model {kind!r} makes no use of {' and '.join(sorted(self.sets))}."
        return self.why_not(machine, config)


def uses_gpu(machine: Machine, config: RunConfig) -> bool:
    """Return whether the run uses an NVIDIA GPU, given its configuration and machine."""
    return (
        bool(machine.gpus)
        if config.train.device == "auto"
        else config.train.device.startswith("cuda")
    )


def gpu_below(machine: Machine, capability: tuple[int, int], what: str) -> str | None:
    """Return why a GPU of this machine is too old for `what`, or None."""
    too_old = [gpu for gpu in machine.gpus if gpu.compute_capability < capability]
    if not too_old:
        return None
    have = ".".join(str(part) for part in too_old[0].compute_capability)
    return (
        f"{what} needs compute capability {capability[0]}.{capability[1]}. "
        f"The {too_old[0].name} has {have}."
    )


def first_of(*checks: Check) -> Check:
    """Return the check that gives the first reason of these, or None."""

    def check(machine: Machine, config: RunConfig) -> str | None:
        return next((why for one in checks if (why := one(machine, config))), None)

    return check


def needs_gpu(
    what: str, capability: tuple[int, int] | None = None, instead: str | None = None
) -> Check:
    """Return the check that the run uses an NVIDIA GPU, of at least a compute capability."""
    advice = f" Use {instead} instead." if instead else ""

    def check(machine: Machine, config: RunConfig) -> str | None:
        if uses_gpu(machine, config):
            too_old = capability and gpu_below(machine, capability, what)
            return too_old and too_old + advice
        least = capability and " of compute capability {}.{} or higher".format(*capability)
        return f"{what} needs an NVIDIA GPU{least or ''}, but this run uses a CPU.{advice}"

    return check


def needs_cpu(machine: Machine, config: RunConfig) -> str | None:
    """Return that the run does not use a CPU, or None."""
    return (
        "It only applies to CPUs, but this run uses a GPU." if uses_gpu(machine, config) else None
    )


def needs_package(package: str, extra: str | None = None) -> Check:
    """Return the check that an optional package, of one of flatout's extras, is installed.

    A machine that is only planned for may have it.
    """
    install = package if extra is None else f'"flatout[{extra}]"'
    missing = f"It needs the package {package}, which is not installed: pip install {install}."
    name = package.replace("-", "_")
    return lambda machine, _config: missing if machine.is_here and not find_spec(name) else None


def without_compiler(machine: Machine, config: RunConfig) -> str | None:
    """Return why torch.compile cannot work here, or None: a CPU needs a C++ compiler."""
    if not uses_gpu(machine, config) and not (shutil.which("g++") or shutil.which("clang++")):
        return "On a CPU torch.compile needs a C++ compiler: apt install g++."
    return None


def load_package(module: str, speedup: str) -> ModuleType:
    """Import and return a module of an optional package, which the speedup's extra installs.

    Its log is silent meanwhile: torchao warns of kernels for formats that nothing here uses.
    Raises: MissingPackage with the command to install it.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackage(
            f"The speedup {speedup!r} needs the package {package}, which is not installed.",
            fix=f'Install it: `pip install "flatout[{speedup}]"`.',
        ) from error
    finally:
        logging.disable(before)
