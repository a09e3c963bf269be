"""STATE: everything that a resume needs, and how each item is read and restored.

A checkpoint contains exactly these items. Everything else must follow from the configuration alone:
the learning rate is a pure function of the step, the data order one of the seed and the position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatout.distributed.tensor import is_shared
from flatout.errors import CheckpointError
from flatout.optim.moments import how_to_resume, kept_by, stored_as
from flatout.storage.json_io import JsonObject
from flatout.storage.streams import shortened
from flatout.training.checkpoint.catalog import Entry
from flatout.training.checkpoint.tensors import dtype_of, empty
from flatout.training.checkpoint.weights import is_elsewhere, parameter_names, weights_of

if TYPE_CHECKING:
    from flatout.assembly.run import Run


PREFIX = "optimizer/"
"""Tensors are called `optimizer/NUMBER/PARAMETER/FIELD`."""
STATED = ("peak_lr", "weight_decay", "betas", "eps", "momentum")
"""Numbers of a group that the configuration sets: the values of the resuming run apply."""
WEIGHTS_ALONE = "or start from its weights only: train.init_from=RUN instead of --resume RUN"

Target = tuple[int, Tensor, str]
"""Optimizer number, parameter and field."""


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
    targets: Callable[[Run, Mapping[str, Entry], Any], dict[str, Tensor]] | None = None
    """Return the tensors to fill, given the index and the stored value."""
    used: Callable[[Run], bool] = lambda _run: True
    """Whether this run has it at all."""


def _best(run: Run) -> JsonObject:
    value: JsonObject = {"val_loss": run.best_val_loss, "step": run.best_step}
    value["evaluations_since"] = run.evaluations_since_best
    return value | {"evaluation_due": True} if run.evaluation_due else value


def _set_best(run: Run, value: JsonObject) -> None:
    run.best_val_loss, run.best_step = value["val_loss"], value["step"]
    run.evaluations_since_best = value.get("evaluations_since", 0)  # not in earlier versions
    run.evaluation_due = value.get("evaluation_due") is True


def _set_scaler(run: Run, value: dict[str, float]) -> None:
    assert run.scaler is not None, "an item that is not used is not restored"
    run.scaler.load_state_dict(value)


def _attribute(name: str) -> StateItem:
    """Return the item of a plain attribute of the run."""
    return StateItem(
        name, lambda run: getattr(run, name), lambda run, value: setattr(run, name, value)
    )


def _fields(run: Run) -> Iterator[tuple[int, Tensor, str, str, Any]]:
    """Yield optimizer number, parameter, its name, field and value of all per-parameter state."""
    names = parameter_names(run)
    for number, optimizer in enumerate(run.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise CheckpointError(
                        "An optimizer updates a tensor that is not a parameter of the model.",
                        fix="Give it model.parameters().",
                    )
                for field, value in optimizer.state.get(parameter, {}).items():
                    yield number, parameter, names[parameter], field, value


def optimizer_tensors(run: Run) -> dict[str, Tensor]:
    """Return the tensors of the optimizers' state.

    Shapes: as the optimizers keep them.
    """
    return {
        f"{PREFIX}{number}/{name}/{field}": value
        for number, _, name, field, value in _fields(run)
        if isinstance(value, Tensor)
    }


def optimizer_value(run: Run) -> JsonObject:
    """Return the optimizers' state other than tensors: scalars per parameter, numbers per group."""
    names = parameter_names(run)
    scalars: JsonObject = {}
    on_cpu: list[str] = []
    for number, parameter, name, field, value in _fields(run):
        key = f"{PREFIX}{number}/{name}/{field}"
        if isinstance(value, Tensor):
            if value.device.type == "cpu" != parameter.device.type:
                on_cpu.append(key)
        elif value is None or isinstance(value, (bool, int, float, str)):
            scalars[key] = value
        else:
            raise CheckpointError(
                f"The optimizer keeps {field} of {name} as {type(value).__name__}, which a "
                "checkpoint cannot store.",
                fix="Keep tensors, numbers or text in optimizer.state.",
            )
    groups = [
        [
            {"parameters": [names[p] for p in group["params"]], "numbers": _numbers(group)}
            for group in optimizer.param_groups
        ]
        for optimizer in run.optimizers
    ]
    return {"scalars": scalars, "on_cpu": on_cpu, "groups": groups}


def join_values(value: JsonObject, others: Iterable[JsonObject]) -> None:
    """Add the values of other parts of a pipeline to those of the first one, in place."""
    for other in others:
        value["scalars"] |= other["scalars"]
        value["on_cpu"] += other["on_cpu"]
        for groups, more in zip(value["groups"], other["groups"], strict=True):
            groups += more


def _numbers(group: JsonObject) -> JsonObject:
    """Return a group's numbers, without switches such as `fused`, which are not state."""
    found = {}
    for key, value in group.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        items = plain if isinstance(plain, (list, tuple)) else [plain]
        if key != "params" and all(
            isinstance(item, (int, float)) and not isinstance(item, bool) for item in items
        ):
            found[key] = plain
    return found


def optimizer_targets(run: Run, index: Mapping[str, Entry], value: JsonObject) -> dict[str, Tensor]:
    """Replace the optimizers' state with the stored one, and return its tensors, still unfilled.

    Shapes: as stored.
    Raises: CheckpointError, before anything changes, when this run's optimizers cannot use it.
    """
    groups = [
        {p: group for group in optimizer.param_groups for p in group["params"]}
        for optimizer in run.optimizers
    ]
    names = parameter_names(run)
    parameters = [{names[p]: p for p in members if p in names} for members in groups]
    scalars = (key for key in value["scalars"] if not is_elsewhere(run, key))
    keys = [*scalars, *(name for name in index if name.startswith(PREFIX))]
    stored = {key: _target_of(key, parameters) for key in keys}
    _require_same_moments(run, list(stored.values()))
    for optimizer in run.optimizers:
        optimizer.state.clear()
    on_cpu, targets = set(value["on_cpu"]), {}
    for key, (number, parameter, field) in stored.items():
        if key in value["scalars"]:
            kept: Any = value["scalars"][key]
        else:
            group = groups[number][parameter]
            device = device_of(field, group, parameter, saved_on_cpu=key in on_cpu)
            kept = targets[key] = _empty_for(parameter, index[key], device)
        run.optimizers[number].state[parameter][field] = kept
    return targets


def _target_of(key: str, parameters: list[dict[str, Tensor]]) -> Target:
    """Return the target that `optimizer/NUMBER/PARAMETER/FIELD` names."""
    _, number, rest = key.split("/", 2)
    name, _, field = rest.rpartition("/")
    if int(number) >= len(parameters) or name not in parameters[int(number)]:
        raise CheckpointError(
            f"The checkpoint has {field} of {name} in optimizer {number}. This run's optimizer "
            f"{number} does not update {name}.",
            fix=f"Resume with the model and the optimizer that wrote it, {WEIGHTS_ALONE}.",
        )
    return int(number), parameters[int(number)][name], field


def _require_same_moments(run: Run, targets: list[Target]) -> None:
    """Check that this run's optimizers keep the same kinds of moments as the checkpoint.

    Raises: CheckpointError.
    """
    fields: dict[tuple[int, Tensor], set[str]] = {}
    for number, parameter, field in targets:
        fields.setdefault((number, parameter), set()).add(field)
    largest_first = sorted(fields.items(), key=lambda item: -item[0][1].numel())
    for (number, parameter), found in largest_first:  # small ones may be fp32 in every kind
        stored, kept = stored_as(found), kept_by(run.optimizers[number], parameter)
        if kept is not None and kept != stored:
            raise CheckpointError(
                f"For {parameter_names(run)[parameter]} the checkpoint has {stored.what}. This run "
                f"keeps {kept.what}.",
                fix=f"Resume {how_to_resume(stored, kept)}, {WEIGHTS_ALONE}.",
            )


def device_of(
    field: str, group: JsonObject, parameter: Tensor, *, saved_on_cpu: bool
) -> torch.device:
    """Return the device of a restored tensor: the one it was saved from, except for `step`.

    torch's fused and capturable kernels read the step on the GPU, the others on the CPU.

    Shapes: parameter of any shape.
    """
    on_cpu = (
        not (group["fused"] or group.get("capturable"))
        if field == "step" and group.get("fused") is not None
        else saved_on_cpu
    )
    return torch.device("cpu") if on_cpu else parameter.device


def _empty_for(parameter: Tensor, entry: Entry, device: torch.device) -> Tensor:
    """Return an unfilled tensor: sharded like the parameter if it has its shape, whole otherwise.

    Shapes: the entry's.
    """
    if entry.shape == tuple(parameter.shape) and (
        device == parameter.device or is_shared(parameter)
    ):
        return torch.empty_like(parameter, dtype=dtype_of(entry), requires_grad=False)
    return empty(entry, device)


def restore_groups(run: Run, value: JsonObject) -> None:
    """Restore the numbers of the parameter groups, except those that the configuration sets."""
    names = parameter_names(run)
    for number, optimizer in enumerate(run.optimizers):
        stored = {
            name: group["numbers"]
            for group in value["groups"][number]
            for name in group["parameters"]
        }
        for group in optimizer.param_groups:
            members = {names[p] for p in group["params"]}
            first, *others = [stored.get(name) for name in members]
            if first is None or any(other != first for other in others):
                raise CheckpointError(
                    f"Optimizer {number} does not group {shortened(sorted(members), 3)} as the "
                    "checkpoint does.",
                    fix="Resume with the optimizer that wrote it.",
                )
            for key, saved in first.items():
                if key in STATED:
                    continue
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(saved)
                else:
                    group[key] = tuple(saved) if isinstance(saved, list) else saved


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
        "loader",
        lambda run: {"position": int(run.loader.position)},
        lambda run, value: run.loader.seek(value["position"]),
    ),
)
"""In restore order."""
