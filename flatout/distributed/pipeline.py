"""Pipeline parallelism: each rank of a group has some of the blocks, and sends hidden states on.

Blocks are divided into stages of equal length. The first one also has the embedding, the last one
the head and the loss. All ranks of a group have the same rows. torch's schedules decide in which
order a rank computes its micro-batches, and send hidden states and their gradients. Modules of
other ranks stay on the meta device, outside of the model: its weights have the same names on every
mesh.

Letters: A micro-batches, B rows, T tokens of the row, S tokens of this rank, D width.

Source: Narayanan et al. 2021, arXiv:2104.04473.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatout.config.sections import ParallelConfig
from flatout.distributed.layout import Layout
from flatout.errors import ConfigError

ARGUMENTS = ("tokens_BT", "targets_BT", "doc_ids_BT")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of hidden states. A stage sends the number of theirs before them."""
FIRST, LAST = ("token_embedding", "position_embedding"), ("final_norm", "unembedding")
"""The modules of a model that belong to the first stage, and to the last."""


def check_stages(model: Any, parallel: Layout | ParallelConfig) -> None:
    """Check that a model can be divided into the stages of `parallel`.

    Raises: ConfigError.
    """
    stated, count = f"parallel.pipeline={parallel.pipeline}", parallel.num_stages
    is_drawn = vars(type(model)).get("draws_everything")  # which subclasses do not inherit
    if not is_drawn or not getattr(model, "unembedding", None):
        raise ConfigError(
            f"{stated} needs model.tied_head=false: the first stage has the embedding, the last "
            "one the head. A model of your own must be an EmbeddingModel with draws_everything.",
            fix="Set model.tied_head=false, or remove parallel.pipeline.",
        )
    if len(model.blocks) % count:
        raise ConfigError(
            f"model.num_layers={len(model.blocks)} cannot be divided into the {count} stages of "
            f"{stated}.",
            fix=f"Set model.num_layers={-(-len(model.blocks) // count) * count}, or a different "
            "parallel.pipeline.",
        )


@contextmanager
def completed(model: Any) -> Iterator[None]:
    """Let a model have the modules of all ranks, on the meta device, inside the block."""
    _put(model, model.elsewhere)
    try:
        yield
    finally:
        _put(model, dict.fromkeys(model.elsewhere))


def _put(model: nn.Module, modules: Mapping[str, Any]) -> None:
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = module


class Stage(nn.Module):
    """Consecutive blocks of a model, with its embedding if it is the first, its loss if the last.

    It is what fully_shard wraps, and what a schedule calls.
    """

    def __init__(self, model: Any, number: int, count: int, autocast: Callable[[], Any]) -> None:
        super().__init__()
        self.number, self.is_first, self.is_last = number, number == 0, number == count - 1
        self._model, self._autocast = (model,), autocast  # a tuple: some modules are not here
        each, modules = len(model.blocks) // count, dict(model.named_modules())
        names = [f"blocks.{block}" for block in range(number * each, (number + 1) * each)]
        self.blocks = [modules[name] for name in names]
        names += [*FIRST * self.is_first, *LAST * self.is_last]
        self.names = [name for name in names if name in modules]
        """Of its modules in the model."""
        for name in self.names:
            self.add_module(name.replace(".", "_"), modules[name])
        self.layers = [*([model.token_embedding] * self.is_first), *self.blocks]

    def forward(
        self,
        entered_BSD: Any = None,
        *,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        doc_ids_BT: Tensor | None = None,
    ) -> Any:
        """Return the hidden states after the blocks, or from the last stage the model's result.

        Shapes:  entered_BSD (B, S, D), which the first stage ignores; tokens_BT, targets_BT,
                 doc_ids_BT as `LanguageModel.forward`.
        """
        (model,) = self._model
        with self._autocast():
            hidden_BSD = model.through(
                self.blocks,
                None if self.is_first else entered_BSD,
                tokens_BT,
                doc_ids_BT,
                model.context,
            )
            return model.loss(hidden_BSD, targets_BT) if self.is_last else hidden_BSD


def stages_of(model: Any, mesh: Any, autocast: Callable[[], Any]) -> list[Stage]:
    """Return this rank's stages of a model on the meta device, which keeps only their modules.

    Raises: ConfigError as `check_stages`.
    """
    check_stages(model, mesh)
    own, count = mesh.rank * mesh.pipeline // mesh.world_size, mesh.num_stages
    every = [Stage(model, number, count, autocast) for number in range(count)]
    stages = every[own :: mesh.pipeline]
    others = [name for stage in every if stage not in stages for name in stage.names]
    model.elsewhere = {name: model.get_submodule(name) for name in others}
    _put(model, dict.fromkeys(others))
    return stages


class Pipeline(nn.Module):
    """The stages of this rank, as the module that training and evaluation call."""

    def __init__(self, model: Any, stages: list[Stage], mesh: Any) -> None:
        super().__init__()
        self.model, self.stages, self._mesh = model, stages, mesh
        self._group = mesh.device_mesh.get_group("pipeline")
        self._schedule: Any = None
        self._results: list[Any] = []

    def forward(self, *arguments: Tensor | None) -> Any:
        """Return the result of the model from the last stage, and zeros from ranks without it.

        It has no backward pass.

        Shapes:  arguments as of `LanguageModel.forward`.
        """
        *_, result = self.results(*arguments, group=self._group)
        zero = torch.zeros((), dtype=torch.int64, device=self._mesh.device)
        return result if self.stages[-1].is_last else (zero, zero)

    def results(self, *arguments: Tensor | None, group: Any = None) -> Iterator[Any]:
        """Yield the results of the stages, which receive from others in the group.

        Without a group, they have zeros instead, and the last one has the loss alone.

        Shapes:  arguments as of `LanguageModel.forward`.
        """
        named: dict[str, Any] = dict(zip(ARGUMENTS, arguments, strict=False))
        mesh, (rows, tokens) = self._mesh, named["tokens_BT"].shape
        shape = (rows, tokens // (mesh.tensor * mesh.context), self.model.config.d_model)
        rank, like = dist.get_rank(self._group), next(self.model.parameters())
        for stage in self.stages:
            before, after = ((rank + step) % mesh.pipeline for step in (-1, 1))
            kind, dtype = torch.zeros(1, dtype=torch.int64, device=mesh.device), like.dtype
            if group is not None and not stage.is_first:
                dist.recv(kind, group=group, group_src=before)
                dtype = DTYPES[int(kind)]  # narrower where matmuls are
            entered_BSD = torch.zeros(shape, dtype=dtype, device=mesh.device)
            entered_BSD.requires_grad = group is None
            if group is not None and not stage.is_first:
                dist.recv(entered_BSD, group=group, group_src=before)
            out = stage(entered_BSD, **named)
            if group is not None and not stage.is_last:
                dist.send(kind.fill_(DTYPES.index(out.dtype)), group=group, group_dst=after)
                dist.send(out, group=group, group_dst=after)
            yield out[0] if group is None and stage.is_last else out

    def step(self, micro_batches: Sequence[Any], scale: float) -> list[Tensor]:
        """Add up the gradients of a step, from losses times `scale`.

        A micro-batch has the arguments of `LanguageModel.forward` as its attributes.

        Returns: [loss_sum, num_valid] of the step, zeros from ranks without the last stage.
        """
        count, device = len(micro_batches), self._mesh.device
        found = {name: [getattr(one, name) for one in micro_batches] for name in ARGUMENTS}
        named = {name: torch.cat(each) for name, each in found.items() if each[0] is not None}
        self._results.clear()
        self._schedule = self._schedule or self._new_schedule(count)
        scales = torch.full((count,), scale, device=device)
        try:
            self._schedule.step(**named, target=scales, return_outputs=False)
        except RuntimeError as error:  # torch wraps the errors of stages
            raise (error.__cause__ or error) from None
        # the first of a run infers shapes
        results = self._results[-count:] or torch.zeros(1, 2, device=device)
        return [torch.stack(each).sum() for each in zip(*results, strict=True)]

    def _new_schedule(self, count: int) -> Any:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        def loss(result: Any, scale: Tensor) -> Any:
            self._results.append((result[0].detach(), result[1].to(result[0])))
            return result[0] * scale[0]

        mesh = self._mesh
        stages: list[Any] = [
            PipelineStage(stage, stage.number, mesh.num_stages, mesh.device, group=self._group)
            for stage in self.stages
        ]
        several = len(stages) > 1
        schedule = get_schedule_class("Interleaved1F1B" if several else "1F1B")
        return schedule(stages if several else stages[0], count, loss, scale_grads=False)
