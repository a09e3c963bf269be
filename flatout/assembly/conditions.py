"""Conditions under which a speedup can run, shared by the `why_not` functions."""

from __future__ import annotations

import importlib
import shutil
from importlib.util import find_spec
from types import ModuleType

from flatout.assembly.noise import without_noise
from flatout.config.schema import RunConfig
from flatout.errors import MissingPackage
from flatout.hardware import Machine


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


def without_triton(
    machine: Machine, config: RunConfig, capability: tuple[int, int], instead: str, what: str
) -> str | None:
    """Return why Triton kernels for `what` cannot run here, or None; `instead` runs on a CPU."""
    if not uses_gpu(machine, config):
        needed = f"{capability[0]}.{capability[1]}"
        return (
            f"It needs an NVIDIA GPU of compute capability {needed} or higher, and this run uses a "
            f"CPU; use {instead} there."
        )
    if find_spec("triton") is None:
        return "It needs the package triton, which is not installed: pip install triton."
    return gpu_below(machine, capability, what)


def without_package(package: str, extra: str) -> str | None:
    """Return that an optional package is missing, with the command to install it, or None."""
    if find_spec(package.replace("-", "_")) is not None:
        return None
    return (
        f'It needs the package {package}, which is not installed: pip install "flatout[{extra}]".'
    )


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
