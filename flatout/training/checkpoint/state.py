"""STATE: everything that a resume needs, and how each item is read and restored.

A checkpoint contains exactly these items. Everything else must follow from the configuration alone:
the learning rate is a pure function of the step, the data order one of the seed and the position.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from flatout.json_io import JsonObject
from flatout.training.checkpoint.catalog import Entry
from flatout.training.checkpoint.optimizer_state import (
    PREFIX,
    missing_optimizer_tensors,
    optimizer_targets,
    optimizer_tensors,
    optimizer_value,
    restore_groups,
)
from flatout.training.checkpoint.weights import weights_of

if TYPE_CHECKING:
    from flatout.assembly.run import Run


@dataclass(frozen=True)
class StateItem:
    """One item of the state: a JSON value, and possibly tensors, stored under `prefix`."""

    name: str
    read: Callable[[Run], Any] = lambda _run: None
    """Return the value."""
    restore: Callable[[Run, Any], object] = lambda _run, _value: None
    """Restore the value, after the tensors."""
    prefix: str = ""
    """Prefix of its tensors' names and of their file names."""
    tensors: Callable[[Run], dict[str, Tensor]] = lambda _run: {}
    """Return the tensors to write."""
    missing: Callable[[Run], dict[str, Tensor] | None] = lambda _run: {}
    """Return stand-ins of the same sizes for the tensors that the first step will add, or None if
    they are unknown.
    """
    targets: Callable[[Run, Mapping[str, Entry], Any], dict[str, Tensor]] | None = None
    """Return the tensors to fill, given the index and the stored value."""
    used: Callable[[Run], bool] = lambda _run: True
    """Whether this run has it at all."""
    reseed: Callable[[Run, int], object] | None = None
    """Set for per-rank items: seeds the item on a rank for which none is stored."""


def _best(run: Run) -> JsonObject:
    value: JsonObject = {"val_loss": run.best_val_loss, "step": run.best_step}
    return value | {"evaluation_due": True} if run.evaluation_due else value


def _set_best(run: Run, value: JsonObject) -> None:
    run.best_val_loss, run.best_step = value["val_loss"], value["step"]
    run.evaluation_due = value.get("evaluation_due") is True


def _set_scaler(run: Run, value: dict[str, float]) -> None:
    assert run.scaler is not None, "an item that is not used is not restored"
    run.scaler.load_state_dict(value)


def _python_rng(_run: Run) -> JsonObject:
    version, words, gauss = random.getstate()
    return {"version": version, "words": list(words), "gauss": gauss}


def _set_python_rng(_run: Run, value: JsonObject) -> None:
    random.setstate((value["version"], tuple(value["words"]), value["gauss"]))


def _numpy_rng(_run: Run) -> JsonObject:
    state: Any = np.random.get_state(legacy=False)
    return {
        "kind": state["bit_generator"],
        "words": state["state"]["key"].tolist(),
        "position": state["state"]["pos"],
        "has_gauss": state["has_gauss"],
        "gauss": state["gauss"],
    }


def _set_numpy_rng(_run: Run, value: JsonObject) -> None:
    words = np.array(value["words"], dtype=np.uint32)
    np.random.set_state(
        (value["kind"], words, value["position"], value["has_gauss"], value["gauss"])
    )


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _reseed_cuda(run: Run, seed: int) -> None:
    torch.cuda.default_generators[run.mesh.device.index or 0].manual_seed(seed)


def _attribute(name: str) -> StateItem:
    """Return the item of a plain attribute of the run."""
    return StateItem(
        name, lambda run: getattr(run, name), lambda run, value: setattr(run, name, value)
    )


STATE: tuple[StateItem, ...] = (
    StateItem(
        "weights",
        prefix="model/",
        tensors=weights_of,
        targets=lambda run, _index, _value: weights_of(run),
    ),
    StateItem(
        "optimizer",
        optimizer_value,
        restore_groups,
        prefix=PREFIX,
        tensors=optimizer_tensors,
        missing=missing_optimizer_tensors,
        targets=optimizer_targets,
    ),
    *map(_attribute, ("step", "tokens", "elapsed_s")),
    StateItem("best", _best, _set_best),
    StateItem(
        "scaler",
        lambda run: run.scaler and run.scaler.state_dict(),
        _set_scaler,
        used=lambda run: run.scaler is not None,
    ),
    StateItem(
        "guard",
        lambda run: run.guard.state_dict(),
        lambda run, value: run.guard.load_state_dict(value),
    ),
    StateItem(
        "feed",
        lambda run: {"position": int(run.feed.position)},
        lambda run, value: run.feed.seek(value["position"]),
    ),
    StateItem("rng_python", _python_rng, _set_python_rng, reseed=lambda _, seed: random.seed(seed)),
    StateItem(
        "rng_numpy", _numpy_rng, _set_numpy_rng, reseed=lambda _, seed: np.random.seed(seed % 2**32)
    ),
    StateItem(
        "rng_torch",
        lambda _: _to_hex(torch.get_rng_state()),
        lambda _, value: torch.set_rng_state(_from_hex(value)),
        reseed=lambda _, seed: torch.default_generator.manual_seed(seed),
    ),
    StateItem(
        "rng_cuda",
        lambda run: _to_hex(torch.cuda.get_rng_state(run.mesh.device)),
        lambda run, value: torch.cuda.set_rng_state(_from_hex(value), run.mesh.device),
        used=lambda run: bool(run.mesh.device.type == "cuda"),
        reseed=_reseed_cuda,
    ),
)
"""In restore order: random generators last, so that no other item can draw from them."""
