"""STATE: the list of what a resume needs, each name with how it is read from a run and how it is
put back.

A checkpoint holds exactly this. What is not listed here must follow from the configuration alone:
the learning rate is a pure function of the step, the order of the data one of the seed and the
position.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatout.errors import CheckpointError
from flatout.optimizers.moments import kept_by, stored_as, way_to_go_on
from flatout.training.checkpoint.tensors import Entry, dtype_of

if TYPE_CHECKING:
    from flatout.assembly.run import Run

VERSION = 1
"""Rises when a name is added or its form changes."""

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What compile and activation checkpointing put into the names of parameters."""

STATED = ("peak_lr", "weight_decay", "betas", "eps", "momentum")
"""What the configuration states of a group: that of the run that goes on counts, not that of the
run that saved.
"""
WEIGHTS_ALONE = "or begin with its weights alone: train.init_from=RUN in place of --resume RUN"


def _always(_run: Run) -> bool:
    return True


def _nothing(_run: Run) -> None:
    return None


def _no_tensors(_run: Run) -> dict[str, Tensor]:
    return {}


def _leave(_run: Run, _value: Any) -> None:
    """Put nothing back: the tensors were all there is."""


@dataclass(frozen=True)
class Part:
    """One name of the state. Its value is JSON; its tensors, if it has any, are safetensors under
    `prefix`.
    """

    name: str
    read: Callable[[Run], Any] = _nothing
    """Return the value."""
    restore: Callable[[Run, Any], None] = _leave
    """Put the value back, after the tensors."""
    prefix: str | None = None
    """Beginning of its tensors' names, and the name of their files."""
    tensors: Callable[[Run], dict[str, Tensor]] | None = None
    """Return the tensors to write."""
    to_come: Callable[[Run], dict[str, Tensor] | None] = _no_tensors
    """Return stand-ins of the same sizes for the tensors that the first step will add; None where
    they are not known.
    """
    targets: Callable[[Run, Mapping[str, Entry], Any], dict[str, Tensor]] | None = None
    """Return the tensors to fill, given what is stored and the value."""
    used: Callable[[Run], bool] = _always
    """Whether this run has it at all."""
    reseed: Callable[[Run, int], object] | None = None
    """Every rank has a value of its own; this makes one for a rank that has none stored."""


def plain_name(name: str) -> str:
    """Return a parameter's name as the model's author wrote it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def weights_and_aliases(core: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every parameter and saved buffer once, and the further names of those that have
    several (a tied head).

    Shapes: as in the model.
    """
    weights: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for name, tensor in core.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"The model keeps {name} as extra state, which a checkpoint cannot hold.",
                fix="Make it a buffer.",
            )
        key = f"model/{plain_name(name)}"
        if id(tensor) in first_name:
            aliases[key] = first_name[id(tensor)]
        else:
            first_name[id(tensor)] = key
            weights[key] = tensor
    return weights, aliases


def _weights(run: Run) -> dict[str, Tensor]:
    return weights_and_aliases(run.core)[0]


def _names(run: Run) -> dict[Tensor, str]:
    """Return the name of every parameter; tensors hash by identity."""
    return {parameter: plain_name(name) for name, parameter in run.core.named_parameters()}


def _optimizer_fields(run: Run) -> Iterator[tuple[int, Tensor, str, str, Any]]:
    """Yield optimizer number, parameter, its name, field and value of everything that optimizers
    keep a parameter.
    """
    names = _names(run)
    for number, optimizer in enumerate(run.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise CheckpointError(
                        "An optimizer updates a tensor that is no parameter of the model.",
                        fix="Give it model.parameters().",
                    )
                for field, value in optimizer.state.get(parameter, {}).items():
                    yield number, parameter, names[parameter], field, value


def _optimizer_tensors(run: Run) -> dict[str, Tensor]:
    return {
        f"optimizer/{n}/{name}/{field}": value
        for n, _, name, field, value in _optimizer_fields(run)
        if isinstance(value, Tensor)
    }


def _optimizer_tensors_to_come(run: Run) -> dict[str, Tensor] | None:
    """Return the parameters themselves in place of fp32 tensors of their shape."""
    names, one_number = _names(run), torch.zeros(())
    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(run.optimizers):
        for parameter in (
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if not optimizer.state.get(p)
        ):
            kept = kept_by(optimizer, parameter)
            if (
                kept is None
                or kept.like_the_parameter is None
                or parameter.element_size() != torch.float32.itemsize
            ):
                return None
            key = f"optimizer/{number}/{names[parameter]}"
            found |= {f"{key}/{field}": parameter for field in kept.like_the_parameter} | {
                f"{key}/{field}": one_number for field in kept.numbers
            }
    return found


def _optimizer_value(run: Run) -> dict[str, Any]:
    """Return what optimizers keep beside tensors: plain numbers a parameter, and the numbers of
    each group.
    """
    names = _names(run)
    scalars: dict[str, Any] = {}
    on_cpu: list[str] = []
    for number, parameter, name, field, value in _optimizer_fields(run):
        key = f"optimizer/{number}/{name}/{field}"
        if isinstance(value, Tensor):
            if value.device.type == "cpu" != parameter.device.type:
                on_cpu.append(key)
        elif value is None or isinstance(value, (bool, int, float, str)):
            scalars[key] = value
        else:
            raise CheckpointError(
                f"The optimizer keeps {field} of {name} as {type(value).__name__}, which a checkpoint cannot hold.",
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


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's numbers. Switches such as `fused` are how this build computes, not state."""
    found = {}
    for key, value in group.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        items = plain if isinstance(plain, (list, tuple)) else [plain]
        if key != "params" and all(
            isinstance(item, (int, float)) and not isinstance(item, bool) for item in items
        ):
            found[key] = plain
    return found


def _optimizer_targets(
    run: Run, index: Mapping[str, Entry], value: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Make the optimizers' tensors anew, as they were laid out when they were saved."""
    places = [
        {
            name: p
            for p, name in _names(run).items()
            if any(p is q for group in optimizer.param_groups for q in group["params"])
        }
        for optimizer in run.optimizers
    ]
    keys = [
        (key, _place(key, places))
        for key in (*value["scalars"], *(name for name in index if name.startswith("optimizer/")))
    ]
    _require_same_moments(run, [place for _, place in keys])
    for optimizer in run.optimizers:
        optimizer.state.clear()
    on_cpu, targets = set(value["on_cpu"]), {}
    groups = [
        {p: group for group in optimizer.param_groups for p in group["params"]}
        for optimizer in run.optimizers
    ]
    for key, (number, parameter, field) in keys:
        if key in value["scalars"]:
            kept: Any = value["scalars"][key]
        else:
            device = _device_of(
                field, groups[number][parameter], parameter, saved_on_cpu=key in on_cpu
            )
            kept = targets[key] = _kept_beside(parameter, index[key], device)
        run.optimizers[number].state[parameter][field] = kept
    return targets


def _place(key: str, places: list[dict[str, Tensor]]) -> tuple[int, Tensor, str]:
    """Return the optimizer number, parameter and field that `optimizer/NUMBER/PARAMETER/FIELD`
    names.
    """
    _, number, rest = key.split("/", 2)
    name, _, field = rest.rpartition("/")
    if int(number) >= len(places) or name not in places[int(number)]:
        raise CheckpointError(
            f"The checkpoint has {field} of {name} in optimizer {number}; this run's optimizer {number} does not update {name}.",
            fix=f"Resume with the model and the optimizer that wrote it, {WEIGHTS_ALONE}.",
        )
    return int(number), places[int(number)][name], field


def _require_same_moments(run: Run, places: list[tuple[int, Tensor, str]]) -> None:
    """Refuse, before anything is changed, what this run's optimizers could not go on with."""
    fields: dict[tuple[int, Tensor], set[str]] = {}
    for number, parameter, field in places:
        fields.setdefault((number, parameter), set()).add(field)
    for (number, parameter), found in sorted(
        fields.items(), key=lambda item: -item[0][1].numel()
    ):  # small ones may be fp32 in every kind
        stored, kept = stored_as(found), kept_by(run.optimizers[number], parameter)
        if kept is not None and kept != stored:
            raise CheckpointError(
                f"For {_names(run)[parameter]} the checkpoint has {stored.what}; this run keeps {kept.what}.",
                fix=f"Resume {way_to_go_on(stored, kept)}, {WEIGHTS_ALONE}.",
            )


def _device_of(
    field: str, group: Mapping[str, Any], parameter: Tensor, *, saved_on_cpu: bool
) -> torch.device:
    """Return where a tensor is kept: where it was saved from, but for the step, which torch's fused
    kernels read on the device.
    """
    on_cpu = (
        not (group["fused"] or group.get("capturable"))
        if field == "step" and group.get("fused") is not None
        else saved_on_cpu
    )
    return torch.device("cpu") if on_cpu else parameter.device


def _kept_beside(parameter: Tensor, entry: Entry, device: torch.device) -> Tensor:
    """Return an unfilled tensor: laid out like the parameter where the shape is its own, whole on
    `device` otherwise.

    Shapes: the entry's.
    """
    if entry.shape == tuple(parameter.shape) and (
        device == parameter.device or isinstance(parameter, DTensor)
    ):
        return torch.empty_like(parameter, dtype=dtype_of(entry), requires_grad=False)
    return torch.empty(entry.shape, dtype=dtype_of(entry), device=device)


def _restore_groups(run: Run, value: Mapping[str, Any]) -> None:
    names = _names(run)
    for number, optimizer in enumerate(run.optimizers):
        stored = {
            frozenset(group["parameters"]): group["numbers"] for group in value["groups"][number]
        }
        for group in optimizer.param_groups:
            members = frozenset(names[p] for p in group["params"])
            if members not in stored:
                raise CheckpointError(
                    f"Optimizer {number} groups {', '.join(sorted(members)[:3])}, ... otherwise than the checkpoint.",
                    fix="Resume with the optimizer that wrote it.",
                )
            for key, saved in stored[members].items():
                if key in STATED:
                    continue
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(saved)
                else:
                    group[key] = tuple(saved) if isinstance(saved, list) else saved


def _set_best(run: Run, value: Mapping[str, Any]) -> None:
    run.best_val_loss, run.best_step = value["val_loss"], value["step"]


def _set_scaler(run: Run, value: dict[str, float]) -> None:
    assert run.scaler is not None, "a part that is not used is not restored"
    run.scaler.load_state_dict(value)


def _python_rng(_run: Run) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {"version": version, "words": list(words), "gauss": gauss}


def _set_python_rng(_run: Run, value: Mapping[str, Any]) -> None:
    random.setstate((value["version"], tuple(value["words"]), value["gauss"]))


def _numpy_rng(_run: Run) -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    words, position = state["state"]["key"], state["state"]["pos"]
    kind, has_gauss, gauss = state["bit_generator"], state["has_gauss"], state["gauss"]
    return {
        "kind": kind,
        "words": words.tolist(),
        "position": position,
        "has_gauss": has_gauss,
        "gauss": gauss,
    }


def _set_numpy_rng(_run: Run, value: Mapping[str, Any]) -> None:
    words = np.array(value["words"], dtype=np.uint32)
    np.random.set_state(
        (value["kind"], words, value["position"], value["has_gauss"], value["gauss"])
    )


def _bytes_of(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _state_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _on_cuda(run: Run) -> bool:
    return bool(run.mesh.device.type == "cuda")


STATE: tuple[Part, ...] = (
    Part(
        "weights",
        prefix="model/",
        tensors=_weights,
        targets=lambda run, index, value: _weights(run),
    ),
    Part(
        "optimizer",
        _optimizer_value,
        _restore_groups,
        prefix="optimizer/",
        tensors=_optimizer_tensors,
        to_come=_optimizer_tensors_to_come,
        targets=_optimizer_targets,
    ),
    Part("step", lambda run: run.step, lambda run, value: setattr(run, "step", value)),
    Part("tokens", lambda run: run.tokens, lambda run, value: setattr(run, "tokens", value)),
    Part(
        "elapsed_s", lambda run: run.elapsed_s, lambda run, value: setattr(run, "elapsed_s", value)
    ),
    Part("best", lambda run: {"val_loss": run.best_val_loss, "step": run.best_step}, _set_best),
    Part(
        "scaler",
        lambda run: run.scaler and run.scaler.state_dict(),
        _set_scaler,
        used=lambda run: run.scaler is not None,
    ),
    Part(
        "feed",
        lambda run: {"position": int(run.feed.position)},
        lambda run, value: run.feed.seek(value["position"]),
    ),
    Part("rng_python", _python_rng, _set_python_rng, reseed=lambda _, seed: random.seed(seed)),
    Part(
        "rng_numpy", _numpy_rng, _set_numpy_rng, reseed=lambda _, seed: np.random.seed(seed % 2**32)
    ),
    Part(
        "rng_torch",
        lambda _: _bytes_of(torch.get_rng_state()),
        lambda _, value: torch.set_rng_state(_state_of(value)),
        reseed=lambda _, seed: torch.default_generator.manual_seed(seed),
    ),
    Part(
        "rng_cuda",
        lambda run: _bytes_of(torch.cuda.get_rng_state(run.mesh.device)),
        lambda run, value: torch.cuda.set_rng_state(_state_of(value), run.mesh.device),
        used=_on_cuda,
        reseed=lambda run, seed: torch.cuda.default_generators[
            run.mesh.device.index or 0
        ].manual_seed(seed),
    ),
)
"""In the order in which it is put back: generators last, so that nothing before them draws from
them unseen.
"""
