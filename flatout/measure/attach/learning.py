"""Looks in the first steps whether weights learn, by the state of gradients and weights.

What the code looks like does not matter. Some values of the largest tensors are kept on their
device until the end, so that nothing waits for a GPU, and the hooks are removed after the last
look.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from flatout.measure.attach.guard import guarded, replaced
from flatout.measure.attach.lines import Line, user_frame

EARLY_STEPS, LOOKS, LEAST = 2, 8, 5
"""Steps of an optimizer before the first look, steps with a look, and fewest that tell something:
the first steps may warm up.
"""
MOST_STEPS = 100
"""Steps of all optimizers after which nothing is looked at any more."""
LATE, LEAST_LATE, SEVERAL = (11, 13, 17, 37, 79), 3, 1.5
"""Steps of an optimizer after which it is looked again whether the update is taken back, fewest of
them that tell something, and the part from which several updates are: those of weights that are
averaged every few steps.
"""
TENSORS, SOME = 8, 64
"""The largest tensors of an optimizer, and values of each, that are looked at."""


NEVER: dict[str, Any] = {"without_gradients": 1.0, "uncleared": 0.0, "unmoved": None, "undone": 0.0}
"""What is known of an optimizer that finds no gradient at all."""


@dataclass
class _Looks:
    """What was seen of one optimizer."""

    weights: list[Tensor]
    """Those that are looked at."""
    steps: int = 0
    looks: int = 0
    is_new: bool = False
    """Whether another optimizer had its first weights before."""
    is_odd: bool = False
    """Whether its gradients are made in another way than by a plain `backward`."""
    bare: int = 0
    """Steps without a backward pass since the one before."""
    backwards: int = 0
    """Backward passes since its last step."""
    had: list[Tensor | None] = field(default_factory=list)
    """The gradients of its last step."""
    is_cleared: bool = False
    """Whether there was no gradient at one of the passes since then."""
    zeros: list[Tensor] = field(default_factory=list)
    """For each of those passes, whether all gradients were zero before it."""
    left: list[Tensor] = field(default_factory=list)
    """For each, whether they were zero after it: as they are, nobody has cleared them."""
    empty: int = 0
    """Of the first LOOKS steps, those without any gradient."""
    given: set[int] = field(default_factory=set)
    """Identities of the weights that had a gradient at one of its steps."""
    full_rows: list[Tensor] = field(default_factory=list)
    """For each look, the share of some rows of the largest weights with a gradient."""
    without: list[Tensor] = field(default_factory=list)
    """For each look, whether the optimizer found no gradient, or zeros."""
    uncleared: list[Tensor] = field(default_factory=list)
    """For each, whether its gradients include those of the step before."""
    before: list[Tensor] = field(default_factory=list)
    """Values before the step."""
    reached: list[Tensor] = field(default_factory=list)
    """Which values have had a gradient."""
    moved: list[Tensor] = field(default_factory=list)
    """Which of them have changed."""
    after: list[Tensor] = field(default_factory=list)
    """Values after the step before."""
    earlier: list[Tensor] = field(default_factory=list)
    """Values before that step."""
    undone: list[Tensor] = field(default_factory=list)
    """For each step but the first, the part of its update that was taken back until the next."""
    late: list[Tensor] = field(default_factory=list)
    """The same of the steps in LATE: an average of weights may begin after some steps."""
    rates: list[float] = field(default_factory=list)
    """The highest learning rate at each look."""
    shares: list[Tensor] = field(default_factory=list)
    """For each, the change of the values that have had a gradient, as a share of them."""

    @property
    def is_done(self) -> bool:
        """Whether it is not looked at any more."""
        return (self.steps if self.is_odd else self.looks) >= LOOKS


class Learning:
    """Whether the optimizers of this process find gradients, clear them, and move weights."""

    def __init__(self) -> None:
        self._looks: WeakKeyDictionary[Optimizer, _Looks] = WeakKeyDictionary()
        self._steps = 0
        """Steps of all optimizers."""
        self.first: Any = WeakIdKeyDictionary()
        """The first weights of each optimizer that there was."""
        self._new = 0
        """Optimizers whose first weights another one had."""
        self._clips: list[tuple[Line | None, Tensor, float]] = []
        """The line and the norm of gradients that were clipped, and the largest norm allowed."""
        self._late_clips = 0
        """Those that followed an optimizer's step before any backward pass."""
        clipping = ExitStack()
        clipping.enter_context(replaced(nn.utils, "clip_grad_norm_", self._clipping))
        self._removes = [
            clipping.close,
            register_optimizer_step_pre_hook(guarded(self._before_step)).remove,
            register_optimizer_step_post_hook(guarded(self._after_step)).remove,
        ]

    def close(self) -> None:
        """Look no longer."""
        while self._removes:
            self._removes.pop()()

    def before_backward(self, asked: Sequence[Any] | None = None) -> None:
        """Note what gradients there are. `asked`: what autograd returns the gradients of instead of
        adding to them.
        """
        every = [*self._looks.values()]
        looks = [one for one in every if not one.is_done]
        are_over = [one.is_done and (one.is_odd or one.steps > LATE[-1]) for one in every]
        if self._steps > MOST_STEPS or (every and all(are_over)):
            self.close()  # not in a hook: torch goes through them
        if not self._removes:
            return
        for one in looks:
            if asked is not None:  # such as those of inputs, for a penalty
                one.is_odd |= any(each is weights for each in asked for weights in one.weights)
                continue
            one.backwards += 1
            if not one.is_cleared:
                gradients = _gradients(one.weights)
                one.is_cleared = not gradients
                if gradients:
                    one.zeros.append(are_zero(gradients))

    def after_backward(self) -> None:
        """Note what gradients a backward pass leaves."""
        for one in self._looks.values() if self._removes else ():
            gradients = [] if one.is_done else _gradients(one.weights)
            one.left += [are_zero(gradients)] if gradients else []

    @property
    def unclipped(self) -> Line | None:
        """Where gradients are clipped when there are none, or too late. None: nowhere."""
        if len(self._clips) < LEAST:
            return None
        is_late = self._late_clips == len(self._clips)
        is_vain = not any(bool(norm) for _, norm, _ in self._clips)
        return self._clips[-1][0] if is_late or is_vain else None

    @property
    def clipped(self) -> tuple[Line | None, float]:
        """Where gradients are clipped, and the largest share of their norm that is left."""
        if len(self._clips) < LEAST:
            return None, 1.0
        left = max(most / (max(float(norm), most) or 1.0) for _, norm, most in self._clips)
        return self._clips[-1][0], left

    def _clipping(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(plain)
        def clip(*args: Any, **kwargs: Any) -> Tensor:
            norm = plain(*args, **kwargs)
            if self._removes and len(self._clips) < LOOKS:
                most = float(args[1] if len(args) > 1 else kwargs["max_norm"])
                self._clips.append((user_frame(sys._getframe(1)), norm.detach(), most))
                every = self._looks.values()
                self._late_clips += bool(every) and not any(
                    one.backwards or one.is_done for one in every
                )
            return norm

        return clip

    def found(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return what was seen of the worst optimizer, by the names in `Evidence`."""
        found: list[dict[str, Any]] = []
        names = {} if model is None else {id(one): name for name, one in model.named_parameters()}
        kinds = (nn.Embedding, nn.EmbeddingBag)
        tables = [] if model is None else [one for one in model.modules() if isinstance(one, kinds)]
        for optimizer, one in self._looks.items():
            if one.weights and one.empty == LOOKS:
                found.append(NEVER | {"watched_optimizer": type(optimizer).__name__})
            if one.is_odd or one.bare or one.looks < LEAST:
                continue
            reached = sum(int(each.sum()) for each in one.reached)
            moved = sum(int(each.sum()) for each in one.moved)
            every = [each for each in _all(optimizer) if each.requires_grad]
            total = max(sum(map(Tensor.numel, every)), 1)
            lost = [
                each  # that had none since either
                for each in every
                if id(each) not in one.given and each.grad is None and each not in optimizer.state
            ]
            found.append(
                {
                    "without_gradients": _share(one.without),
                    "uncleared": _share(one.uncleared),
                    "unmoved": 1 - moved / reached if reached else None,
                    "weights_dtype": str(one.weights[0].dtype).removeprefix("torch."),
                    "highest_lr": max(one.rates, default=None),
                    "updates": float(torch.stack(one.shares).max())
                    if one.shares and one.rates[:1] >= one.rates[-1:] and len(self._looks) == 1
                    else None,  # neither a warm-up, nor an adversary's
                    "watched_optimizer": type(optimizer).__name__,
                    "unreached": sum(map(Tensor.numel, lost)) / total,
                    "unreached_names": tuple(names[id(e)] for e in lost if id(e) in names),
                    "undone": max(
                        float(torch.stack(seen).median())
                        if len(seen) >= least and len(self._looks) == 1
                        else 0.0
                        for seen, least in ((one.undone, LEAST), (one.late, LEAST_LATE))
                    ),
                    "full_rows": float(torch.stack(one.full_rows).mean())
                    if one.full_rows and any(one.weights[0] is each.weight for each in tables)
                    else None,
                    "largest_share": one.weights[0].numel() / total,
                }
            )
        worst = max(
            found,
            key=lambda one: (
                one["without_gradients"]
                + one["uncleared"]
                + one["undone"]
                + (one["unmoved"] or 0.0)
            ),
            default={},
        )
        seen = [one for one in self._looks.values() if not one.is_odd]
        bare = (one.bare / min(max(one.steps, LEAST), EARLY_STEPS + LOOKS) for one in seen)
        return worst | {
            "new_optimizers": self._new / max(self._steps, LEAST),
            "bare_steps": max(bare, default=0.0),
            "clipped_to": self.clipped[1],
        }

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        if torch.compiler.is_compiling():
            return
        if optimizer not in self._looks:
            every = _all(optimizer)
            is_new = every[0] in self.first
            self.first[every[0]] = True
            every = [each for each in every if each.requires_grad]  # a part may be frozen
            every.sort(key=lambda weights: -weights.numel())
            largest = [each for each in every if each.device == every[0].device][:TENSORS]
            self._looks[optimizer] = _Looks([each for each in largest if each.numel()])
            self._looks[optimizer].is_new = is_new
        one = self._looks[optimizer]
        has_closure = len(args) > 1 and args[1] is not None
        one.is_odd |= has_closure or kwargs.get("closure") is not None
        one.is_odd |= not one.weights
        # values from before a step are there inside of another one, of the class that it extends
        is_bare = one.steps > 0 and one.backwards == 0 and not one.before
        one.bare += is_bare and not one.is_done
        one.steps += 1
        if one.steps <= LOOKS and len(args) < 2 and not kwargs:  # a closure makes them itself
            one.empty += all(each.grad is None for each in _all(optimizer))
        if one.is_odd or one.steps <= EARLY_STEPS:
            return
        if one.is_done:
            if one.steps in LATE:
                one.before, one.after = [some_of(weights) for weights in one.weights], []
            elif one.after and one.steps - 1 in LATE:
                one.late.append(_taken_back(one, [some_of(weights) for weights in one.weights]))
            return
        one.given |= {id(each) for each in _all(optimizer) if each.grad is not None}
        first = one.weights[0].grad
        if first is not None and first.dim() == 2 and not first.is_sparse:
            own = getattr(first.detach(), "_local_tensor", first.detach())
            rows = own[:: max(len(own) // SOME, 1)]
            one.full_rows.append((rows != 0).any(1).double().mean())
        gradients = _gradients(one.weights)
        is_zero = are_zero(gradients) if gradients else torch.tensor(True)
        are_own = bool(gradients and one.left) and torch.stack(one.left).all()
        one.without.append(is_zero & ~torch.as_tensor(are_own, device=is_zero.device))
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        one.rates += [max(rates)] if rates else []
        now = [weights.grad for weights in one.weights]
        are_same = bool(one.had) and all(
            a is b for a, b in zip(now, one.had, strict=True) if a is not None
        )
        is_kept = gradients and are_same and one.zeros and not one.is_cleared
        one.uncleared.append(~torch.stack(one.zeros).any() if is_kept else torch.tensor(False))
        one.before = [some_of(weights) for weights in one.weights]
        if one.after:
            one.undone.append(_taken_back(one, one.before))
        one.reached = one.reached or [
            torch.zeros_like(each, dtype=torch.bool) for each in one.before
        ]
        one.moved = one.moved or [torch.zeros_like(each, dtype=torch.bool) for each in one.before]
        for reached, weights in zip(one.reached, one.weights, strict=True):
            if weights.grad is not None and not weights.grad.is_sparse:
                reached |= some_of(weights.grad) != 0

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        one = self._looks.get(optimizer)
        if one is not None and one.is_new and one.steps == 1:
            self._new += bool(optimizer.state)  # without one, it makes no difference
        if one is None or one.is_odd or torch.compiler.is_compiling():
            return
        if one.before and one.is_done:
            one.after, one.earlier = [some_of(weights) for weights in one.weights], one.before
            one.before = []
        if one.is_done:
            return
        if one.before:
            one.looks += 1
            each = zip(one.moved, one.reached, one.weights, one.before, strict=True)
            sizes, changes = list[Tensor](), list[Tensor]()
            for moved, reached, weights, before in each:
                change = some_of(weights) - before
                moved |= reached & (change != 0)
                changes.append((change * reached).abs().double().sum())
                sizes.append((before * reached).abs().double().sum())
            one.shares.append(torch.stack(changes).sum() / torch.stack(sizes).sum())
            one.after, one.earlier = [some_of(weights) for weights in one.weights], one.before
            one.before = []
        one.had = [weights.grad for weights in one.weights]
        one.backwards, one.is_cleared, one.zeros, one.left = 0, False, [], []


def _taken_back(one: _Looks, latest: list[Tensor]) -> Tensor:
    """Return the part of the last update that is gone, of the values that learn.

    Those that are exactly as before may be masked, unless all are.
    Shapes: returns a tensor without dimensions.
    """
    now, then, first = (torch.cat(each).double() for each in (latest, one.after, one.earlier))
    update = then - first
    learns = now != first
    update = update * (learns | ~(learns & (update != 0)).any())
    share = ((then - now) * update).sum() / update.square().sum().clamp_min(1e-300)
    return share * (share < SEVERAL)


def _all(optimizer: Optimizer) -> list[Tensor]:
    """Return the weights of an optimizer."""
    return [each for group in optimizer.param_groups for each in group["params"]]


Known = dict[int, tuple[int, float | None, float]]
"""See `gradients_of_all`."""


def gradients_of_all() -> Known:
    """Return the numbers of all weights with gradients, and sums of some values of both, by
    identity.

    The sum of weights is None for those that an optimizer has. {} where no optimizer has any of
    them: it has copies.
    """
    claimed: set[int] = set()
    known: list[nn.Parameter] = []
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer):
            claimed |= {id(weights) for group in one.param_groups for weights in group["params"]}
        elif issubclass(type(one), nn.Parameter) and one.requires_grad and one.grad is not None:
            known.append(one)
    if not any(id(one) in claimed for one in known):
        return {}
    return {
        id(one): (
            one.numel(),
            None if id(one) in claimed else float(one.detach().flatten()[:SOME].double().sum()),
            grad._version + (0.0 if grad.is_sparse else float(some_of(grad).double().sum())),
        )
        for one in known
        if (grad := one.grad) is not None
    }


def wasted(before: Known, model: nn.Module | None, owned: Any = ()) -> dict[str, Any]:
    """Return the share of the gradients that belong to weights which nothing updates.

    Those have no optimizer, and the values that they had before, however others are updated, and
    other gradients, unless nothing uses them any more. A model that an optimizer had which is gone,
    such as a copy for one task, tells nothing. Those
    of the model are named, of other models in training mode, and containers of the model's modules
    in which there are some, which `parameters()` does not see.
    """
    now = gradients_of_all()
    if not now or not before or model is None:
        return {}
    first: Any = next(model.parameters(), None)
    if first in owned and now.get(id(first), (0, 0.0, 0.0))[1] is not None:
        return {}
    same = {
        key
        for key, (size, values, gradient) in now.items()
        if values is not None
        and before.get(key, (0,))[:2] == (size, values)
        and before[key][2] != gradient
    }
    share = sum(now[key][0] for key in same) / sum(each[0] for each in now.values())
    every = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    modules = [each for each in every if "_modules" in vars(each)]  # the others are being made
    parts = {id(part) for each in modules for part in each.children()}
    roots = [each for each in modules if each.training and id(each) not in parts]
    names = dict[int, str]()
    for root in (model, *roots):
        of = "" if root is model else f"{type(root).__name__}."
        for name, each in root.named_parameters():
            if id(each) in same:
                names.setdefault(id(each), f"{of}{name}")
    held = (
        (f"{path}.{key}".removeprefix("."), leaf)
        for path, each in model.named_modules()
        for key, value in vars(each).items()
        if key[0] != "_"
        for leaf in tree_leaves(value)
    )
    unregistered = {
        name
        for name, leaf in held
        for one in (leaf.parameters() if isinstance(leaf, nn.Module) else [leaf])
        if id(one) in same
    }
    return {
        "wasted_gradients": share,
        "never_updated": tuple(names.values()),
        "unregistered": tuple(sorted(unregistered)),
    }


def _gradients(weights: list[Tensor]) -> list[Tensor]:
    """Return the gradients that there are. Sparse ones count as others."""
    return [each.grad for each in weights if each.grad is not None]


def are_zero(gradients: list[Tensor]) -> Tensor:
    """Return whether all values are zero that are looked at.

    Shapes: returns a tensor without dimensions.
    """
    dense = [some_of(each) for each in gradients if not each.is_sparse]
    return (
        torch.stack([(each == 0).all() for each in dense]).all() if dense else torch.tensor(False)
    )


def some_of(tensor: Tensor) -> Tensor:
    """Return a copy of some values, of a divided tensor those of this process.

    Their stride has no factor in common with the last dimension, so that all columns take turns.
    Shapes: returns (at most SOME,).
    """
    own = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    width, stride = own.shape[-1] if own.dim() else 1, max(own.numel() // SOME, 1)
    while math.gcd(stride, width) > 1:
        stride -= 1
    return own.flatten()[::stride][:SOME].clone()


def _share(seen: list[Tensor]) -> float:
    return sum(map(bool, seen)) / len(seen)
