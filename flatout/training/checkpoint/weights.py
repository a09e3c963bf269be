"""The weights of a model, under the names that its author gave them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flatout.errors import CheckpointError
from flatout.models.lora import adapters_of

if TYPE_CHECKING:
    from flatout.assembly.run import Run
    from flatout.distributed.tensor import Cut
    from flatout.models.language_model import LanguageModel

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that compile and activation checkpointing insert into the names of parameters."""


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes in WRAPPERS."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter_names(run: Run) -> dict[Tensor, str]:
    """Return the name of every parameter. Tensors hash by identity."""
    return {parameter: plain_name(name) for name, parameter in run.core.named_parameters()}


def weights_and_aliases(core: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every parameter and saved buffer once, and the other names of shared ones.

    A tied head, for example, has two names. With LoRA, the frozen weights are omitted: a
    checkpoint contains the adapters and names which weights they belong to.

    Shapes: as in the model.
    """
    named = core.named_parameters(remove_duplicate=False) if adapters_of(core) else ()
    return _without(core, (name for name, parameter in named if not parameter.requires_grad))


def weights_of(run: Run) -> dict[str, Tensor]:
    """Return every parameter and saved buffer of a run's model once. With LoRA, as above.

    Shapes: as in the model.
    """
    return weights_and_aliases(run.core)[0]


def cuts_of(core: LanguageModel, names: Iterable[str]) -> dict[str, Cut]:
    """Return how ranks share the tensors of a checkpoint with these names, if they do.

    The state of an optimizer is divided as the weight that it belongs to.
    """
    if getattr(core, "split", None) is None:
        return {}
    cuts = {plain_name(name): cut for name, cut in core.tensor_cuts().items()}
    return {name: cuts[weight] for name in names if (weight := weight_of(name)) in cuts}


def weight_of(name: str) -> str:
    """Return the name of the weight that a tensor of a checkpoint is, or whose state it is."""
    kind, own = name.split("/", 1)
    return own if kind == "model" else own.split("/", 1)[1].rpartition("/")[0]


def is_elsewhere(run: Run, name: str) -> bool:
    """Return whether only other ranks of a pipeline have a tensor of a checkpoint."""
    others = getattr(run.core, "elsewhere", ())
    return any(weight_of(name).startswith(f"{module}.") for module in others)


def initial_weights(core: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that `train.init_from` sets: all but the adapters of LoRA.

    Shapes: as in the model.
    """
    adapters = adapters_of(core).items()
    names = (f"{name}.{own}" for name, each in adapters for own, _ in each.named_parameters())
    return _without(core, names)[0]


def _without(core: nn.Module, left_out: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return `weights_and_aliases` of all but the named tensors.

    Names, because `state_dict` frees weights that fully_shard has gathered, as after an evaluation:
    the module's parameters are then other tensors.
    """
    ignored = set(left_out)
    weights: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for name, tensor in core.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"The model keeps {name} as extra state, which a checkpoint cannot store.",
                fix="Make it a buffer.",
            )
        key = f"model/{plain_name(name)}"
        if name in ignored:
            continue
        if id(tensor) in first_name:
            aliases[key] = first_name[id(tensor)]
        else:
            first_name[id(tensor)] = key
            weights[key] = tensor
    return weights, aliases
