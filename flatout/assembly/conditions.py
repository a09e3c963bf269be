"""Conditions under which a speedup can run, shared by the `why_not` functions."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

from flatout.assembly.noise import without_noise
from flatout.config.schema import RunConfig
from flatout.errors import MissingPackage
from flatout.hardware import Machine

Check = Callable[[Machine, RunConfig], str | None]
"""Returns one sentence on why a speedup cannot or should not run, or None."""


def always(_machine: Machine, _config: RunConfig) -> str | None:
    """Return None: the speedup runs anywhere."""
    return None


def without_softcap(_machine: Machine, config: RunConfig) -> str | None:
    """Return why kernels for attention cannot compute this model, or None."""
    if config.model.own().get("attention_softcap") is None:
        return None
    return "No attention kernel limits the scores, as model.attention_softcap asks."


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
        f"{what} needs compute capability {capability[0]}.{capability[1]}; "
        f"the {too_old[0].name} has {have}."
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
        return f"{what} needs an NVIDIA GPU{least or ''}, and this run uses a CPU.{advice}"

    return check


def needs_cpu(machine: Machine, config: RunConfig) -> str | None:
    """Return that the run does not use a CPU, or None."""
    return (
        "It only applies to CPUs, and this run uses a GPU." if uses_gpu(machine, config) else None
    )


def needs_package(package: str, extra: str | None = None) -> Check:
    """Return the check that an optional package, of one of flatout's extras, is installed."""
    install = package if extra is None else f'"flatout[{extra}]"'
    missing = f"It needs the package {package}, which is not installed: pip install {install}."
    return lambda _machine, _config: None if find_spec(package.replace("-", "_")) else missing


def without_compiler(machine: Machine, config: RunConfig) -> str | None:
    """Return why torch.compile cannot work here, or None: a CPU needs a C++ compiler."""
    if not uses_gpu(machine, config) and not (shutil.which("g++") or shutil.which("clang++")):
        return "On a CPU torch.compile needs a C++ compiler: apt install g++."
    return None


def load_package(module: str, speedup: str, extra: str) -> ModuleType:
    """Import and return a module of an optional package, without its startup messages.

    Raises: MissingPackage with the command to install it.
    """
    try:
        with without_noise():
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackage(
            f"The speedup {speedup!r} needs the package {package}, which is not installed.",
            fix=f'Install it: `pip install "flatout[{extra}]"`.',
        ) from error
