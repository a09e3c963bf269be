"""Low-rank adapters (LoRA) beside the linear layers of the blocks, whose weights are frozen.

An adapter adds B A x times a scale to the product W x. Only A and B are trained. B starts at zero,
so that a new model computes exactly what its base does.

Letters: I width in, O width out, P rows of a part of a weight, R rank, or the sum over parts.

Source: Hu et al. 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.config.registry import nearest
from flatout.config.sections import LoraConfig
from flatout.config.words import value_for
from flatout.errors import ConfigError
from flatout.models.language_model import LanguageModel, ParameterKind
from flatout.models.layers import Linear, dropped
from flatout.ops import at_least_fp32

PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "output": ("o",)}
"""Names of the parts of a layer, each of which gets its own adapter. Other layers are one part with
the layer's name.
"""
EVERY = "all-linear"
"""The target that stands for all of them."""
INSIDE = ".adapters."
"""What separates the name of a layer from that of its adapter."""
Rows = tuple[int, int]
"""The first row of a weight that a part has, and the one after its last."""
M = TypeVar("M", bound=LanguageModel)


class Adapter(nn.Module):
    """Two thin matrices for some rows of a weight: A narrows the input to the rank, B widens it."""

    def __init__(self, weight_OI: Tensor, rows: Rows, config: LoraConfig) -> None:
        super().__init__()
        self.rows = rows
        self.scale = config.scale
        start, end = rows
        rank, width_in = config.rank or 0, weight_OI.shape[1]
        self.lora_A = nn.Parameter(weight_OI.new_empty(rank, width_in, dtype=torch.float32))
        self.lora_B = nn.Parameter(weight_OI.new_empty(end - start, rank, dtype=torch.float32))
        self.init_weights()

    def init_weights(self) -> None:
        """Draw A as in a new nn.Linear. B is 0, so that the layer is unchanged at first."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)


class LoraLinear(Linear):
    """A frozen linear layer with adapters, in its place. The name of its weight stays."""

    def __init__(self, layer: Linear, parts: Mapping[str, Rows], config: LoraConfig) -> None:
        nn.Module.__init__(self)  # Linear's own would allocate another weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.ops, self.activation = layer.ops, layer.activation
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = config.scale
        self.dropout = config.dropout
        self.parts = dict(parts)
        self.adapters = nn.ModuleDict(
            {name: Adapter(layer.weight.detach(), rows, config) for name, rows in parts.items()}
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's product plus that of the adapters, through the activation if any.

        Shapes:  hidden (..., I).
        Returns: (..., O).
        """
        is_autocast = torch.is_autocast_enabled(hidden.device.type)
        weight = self.weight if is_autocast else at_least_fp32(self.weight)
        if not self.adapters:
            return self.ops.linear(hidden, weight, self.bias, activation=self.activation)
        product = self.ops.linear(hidden, weight, self.bias)
        dtype = product.dtype
        # The adapters are stacked, so that two matmuls are enough for all of them.
        narrow: list[Tensor] = []
        widen: list[Tensor] = []
        done = 0
        for name, (start, end) in self.parts.items():
            adapter: Adapter = self.adapters[name]  # type: ignore[assignment]
            narrow.append(adapter.lora_A)
            # Rows between the parts have no adapter, and get an empty matrix.
            widen += [adapter.lora_B.new_zeros(start - done, 0), adapter.lora_B]
            done = end
        widen.append(widen[-1].new_zeros(self.out_features - done, 0))
        narrow_RI = torch.cat(narrow)
        widen_OR: Tensor = torch.block_diag(*widen)  # type: ignore[no-untyped-call]
        if not is_autocast:
            hidden, product = hidden.to(narrow_RI.dtype), product.to(narrow_RI.dtype)
        hidden = dropped(hidden, self.dropout, self.training)
        narrowed = self.scale * functional.linear(hidden, narrow_RI)
        whole = torch.addmm(product.flatten(0, -2), narrowed.flatten(0, -2), widen_OR.t())
        product = whole.view(product.shape).to(dtype)
        return product if self.activation is None else self.activation(product)


def require_weights(config: LoraConfig, init_from: str | None) -> None:
    """Check that adapters have weights beside them.

    Raises: ConfigError.
    """
    if config.rank is not None and init_from is None:
        raise ConfigError(
            f"lora.rank={config.rank} trains adapters of existing weights, but train.init_from "
            "names none.",
            fix="Set train.init_from=RUN, or remove lora.rank.",
        )


def with_adapters(model: M, config: LoraConfig) -> M:
    """Freeze a model and add the adapters that `config` describes, in place.

    Without a rank the model is returned unchanged.
    Raises: ConfigError when the model has no such layer, or the rank is larger than one has.
    """
    if config.rank is None:
        return model
    layers = adaptable(model)
    targets = _checked_targets(config.targets, layers)
    model.requires_grad_(False)
    for name, parts in layers.items():
        chosen = {part: rows for part, rows in parts.items() if part in targets}
        parent, _, own = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, Linear)
        for part, (start, end) in chosen.items():
            if config.rank > (most := min(end - start, layer.in_features)):
                raise ConfigError(
                    f"lora.rank={config.rank} is more than the layer {part} can have: its weight "
                    f"is {end - start} x {layer.in_features}.",
                    fix=f"Set lora.rank to {most} or less, such as {min(8, most)}, or remove "
                    f"{part} from lora.targets.",
                )
        setattr(model.get_submodule(parent), own, LoraLinear(layer, chosen, config))
    kinds_of_base = model.parameter_kinds
    added: dict[str, ParameterKind] = {
        f"{name}.{matrix}": "hidden"
        for name in adapters_of(model)
        for matrix in ("lora_A", "lora_B")
    }
    # A custom model lists its parameters by name, and these are not among them.
    model.parameter_kinds = lambda: kinds_of_base() | added  # type: ignore[method-assign]
    return model


def adaptable(model: LanguageModel) -> dict[str, dict[str, Rows]]:
    """Return the linear layers of the blocks by name, each with the rows of its parts.

    Layers of a subclass are omitted: the model may read their weights without calling them.
    """
    stacked = model.stacked_rows()
    found: dict[str, dict[str, Rows]] = {}
    for inside, layer in model.blocks.named_modules():
        if type(layer) is Linear:
            name, own = f"blocks.{inside}", inside.rpartition(".")[2]
            counts = stacked.get(f"{name}.weight", (layer.out_features,))
            parts = PARTS.get(own, (own,))
            if len(parts) != len(counts):
                parts, counts = (own,), (layer.out_features,)
            ends = [sum(counts[: number + 1]) for number in range(len(counts))]
            found[name] = {
                part: (end - count, end)
                for part, count, end in zip(parts, counts, ends, strict=True)
            }
    return found


def _checked_targets(targets: Sequence[str], layers: Mapping[str, Mapping[str, Rows]]) -> set[str]:
    """Return the parts that `lora.targets` names.

    Raises: ConfigError for an unknown one, with the nearest name or what another tool means by it.
    """
    known = list(dict.fromkeys(part for parts in layers.values() for part in parts))
    if not known:
        raise ConfigError(
            "The blocks of this model have no linear layers that can be adapted.",
            fix="Remove lora.rank, or write blocks of flatout.models.layers.Linear.",
        )
    for target in targets:
        if target != EVERY and target not in known:
            guess = value_for("lora.targets", target) or nearest(target, [*known, EVERY])
            listed = ", ".join(known)
            raise ConfigError(
                f"lora.targets names {target!r}. The linear layers of this model are {listed}.",
                fix=f"Did you mean {guess!r}?" if guess else f"Set lora.targets={EVERY}.",
            )
    return set(known) if EVERY in targets else set(targets)


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a model by name, such as `blocks.0.attention.qkv.adapters.q`."""
    return {name: each for name, each in model.named_modules() if isinstance(each, Adapter)}


def parameters_by_part(model: LanguageModel) -> dict[str, int]:
    """Return the parameters of the embedding, of each child of the blocks, of the head, the rest.

    Adapters (LoRA) are a separate part. A tied head counts as the embedding.
    """
    kinds, found = model.parameter_kinds(), Counter[str]()
    for name, parameter in model.named_parameters():
        words, kind = name.split("."), kinds[name]
        if INSIDE in name:
            part = "adapters"
        elif words[0] == "blocks" and len(words) > 3:
            part = f"blocks.{words[2]}"
        else:
            part = kind if kind in ("embedding", "head") else "other"
        found[part] += parameter.numel()
    return dict(found)


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to some rows of a weight: scale times `widen` times `narrow`."""

    rows: Rows
    narrow: Tensor
    """The adapter's lora_A (R, I)."""
    widen: Tensor
    """The adapter's lora_B (P, R)."""
    scale: float


def merge(name: str, weight: Tensor, deltas: Mapping[str, Sequence[Delta]]) -> Tensor:
    """Return the weight `name` of a base with what `deltas` adds to it.

    Weights without adapters are returned themselves. Calling it for one tensor at a time keeps
    the memory at that of the largest.

    Shapes:  weight any; with adapters (O, I).
    Returns: the same shape and dtype.
    Cost:    2 O I R FLOP.
    """
    if name not in deltas:
        return weight
    merged = at_least_fp32(weight).clone()
    for delta in deltas[name]:
        start, end = delta.rows
        merged[start:end].addmm_(delta.scale * delta.widen.to(merged), delta.narrow.to(merged))
    return merged.to(weight.dtype)
