"""The contract of every language model: one forward that contains the loss, in separable parts.

Models are built on the meta device, allocated shard by shard, and drawn tensor by tensor.

A decoder keeps state of the tokens that it has read, so that the next one is cheap.

Letters: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal, Self, final

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from flatout.config.registry import MODELS
from flatout.config.schema import RunConfig, explain
from flatout.config.sections import Section
from flatout.distributed.context import Context
from flatout.distributed.pipeline import completed
from flatout.distributed.tensor import Cut, Split, boxes_of, is_shared, local
from flatout.errors import ConfigError, ShapeError
from flatout.models.layers import Embedding, Linear, check_length, dropped
from flatout.ops import Ops
from flatout.ops.cross_entropy import capped, logits_of, sharded
from flatout.storage.json_io import JsonObject

ParameterKind = Literal["hidden", "embedding", "head", "vector"]
"""hidden: a matrix between activations; embedding: a table with a row per index; head: the output
weight; vector: a norm or a bias.
"""

INIT_STD = 0.02
"""Standard deviation of initial weights (GPT-2: Radford et al. 2019)."""
DRAWS = {nn.init.normal_, nn.init.kaiming_uniform_, nn.init.uniform_, Tensor.uniform_}
"""What models draw their weights with."""


class _Drawing(TorchFunctionMode):
    """Skips draws of tensors without values, for which torch would import its compiler.

    With `cuts`, others are drawn whole, in fp32 on the CPU, and a tensor gets this rank's part.
    """

    def __init__(self, cuts: Mapping[Tensor, Cut | None] | None = None) -> None:
        super().__init__()
        self._cuts = cuts

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        target = args[0] if args else named.get("tensor")
        if func not in DRAWS or not isinstance(target, Tensor):
            return func(*args, **named)
        if self._cuts is not None:
            whole = torch.empty(target.shape)
            func(whole, *args[1:], **{key: one for key, one in named.items() if key != "tensor"})
            if target.is_meta:  # of another rank
                return target
            with torch.no_grad():
                for there, here in boxes_of(target, self._cuts.get(target)):
                    box = zip(there, here.shape, strict=True)
                    here.copy_(whole[tuple(slice(start, start + size) for start, size in box)])
        return target


@dataclass(frozen=True)
class Flops:
    """Training FLOPs per token of the matmuls. Backward costs twice as much as forward."""

    palm: int
    """Every query against all T keys: the usual convention for MFU (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B).
    """
    causal_exact: Fraction
    """Every query against the keys that it sees: the minimum of a causal model."""


class LanguageModelConfig(Section):
    """Configuration keys of every model."""

    used_with: ClassVar[Mapping[str, str]] = {}
    """Keys that have an effect only with one of these values of others."""
    vocab_size: int = Field(ge=1)
    """Rows of the embedding (V)."""
    logit_softcap: float | None = Field(None, gt=0)
    """Limit the logits to plus or minus this value with a tanh. None means no limit."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log of the softmax denominator in the training loss. A small one, such
    as 1e-4, keeps logits from drifting.
    """


class Decoder(ABC):
    """Reads a document piece by piece and returns the logits of the next token after each piece.

    `LanguageModel.decoder` creates one. What it keeps in between depends on the model: keys and
    values, a recurrent state of constant size, or only the tokens.
    """

    max_tokens: int | None
    """The maximum number of tokens. None means no limit."""
    num_tokens: int
    """Tokens read so far, per row."""

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0

    @final
    def has_room(self, num_tokens: int) -> bool:
        """Return whether it can read this many more tokens."""
        return self.max_tokens is None or self.num_tokens + num_tokens <= self.max_tokens

    @final
    @torch.no_grad()
    def read(self, tokens_BT: Tensor) -> Tensor:
        """Read more tokens and return the logits of the next one.

        They equal those of a full pass over all tokens read.

        Shapes:  tokens_BT (B, T) integers, T at least 1; every call has the same rows.
        Returns: logits_BV.
        Raises:  ShapeError when there is no room for the tokens.
        """
        num_tokens = tokens_BT.shape[1]
        if num_tokens < 1 or not self.has_room(num_tokens):
            raise ShapeError(
                f"Cannot read {num_tokens} more tokens: the decoder has read {self.num_tokens} of "
                f"at most {self.max_tokens}.",
                fix="Pass at least one token. When the decoder is full, start a new one with the "
                "last part of the text.",
            )
        logits_BV = self.scores_after(tokens_BT)
        self.num_tokens += num_tokens
        return logits_BV

    @abstractmethod
    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Read tokens and return the logits after them. `num_tokens` does not count them yet.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """


@final
class RecomputingDecoder(Decoder):
    """Keeps the tokens and recomputes all of them: slow, but works for every model."""

    def __init__(self, next_logits: Callable[[Tensor], Tensor], max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._next_logits = next_logits
        self._read: list[Tensor] = []

    def scores_after(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits after all tokens, computed from the first one on.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        self._read.append(tokens_BT)
        return self._next_logits(torch.cat(self._read, dim=1))


class LanguageModel(nn.Module, ABC):
    """Embedding, blocks and head. Training compiles, wraps and calls only `forward`."""

    Config: ClassVar[type[LanguageModelConfig]]
    """The configuration keys of the model."""
    draws_everything: ClassVar[bool] = False
    """Whether the model can be built on the meta device: `init_weights` sets every parameter, with
    constants or what `DRAWS` lists, and moving to a device restores every buffer. A subclass
    does not inherit it.
    """
    divides_rows: ClassVar[bool | None] = None
    """Whether several ranks may share a row (`context`): True, with parts from its start and its
    end (attention), False, with consecutive tokens (a recurrence), or None, not at all.
    """
    config: LanguageModelConfig
    blocks: nn.ModuleList

    """Called in order, each as block(hidden_BTD, doc_ids_BT, *shared) -> hidden_BTD."""
    context: Context | None = None
    """This rank's part of each row. None means all of it. Only `forward` divides rows."""
    split: Split | None = None
    """This rank's part of each layer. None means all of it."""
    elsewhere: Mapping[str, nn.Module]
    """By name, the modules that other ranks of a pipeline have, on the meta device."""

    def __init__(self, config: LanguageModelConfig, ops: Ops) -> None:
        super().__init__()
        self.elsewhere = {}
        self.config = config
        self.ops = ops

    @property
    def layers(self) -> Sequence[nn.Module]:
        """What is compiled, recomputed and sharded one by one: the blocks of this rank."""
        return [block for block in self.blocks if block is not None]

    def set_ops(self, ops: Any) -> None:
        """Replace the functions that the model and its modules call."""
        for module in self.modules():
            if "ops" in vars(module):
                module.ops = ops

    @classmethod
    def check(cls, values: JsonObject, *, seq_len: int) -> LanguageModelConfig:
        """Return this model's configuration from the keys under `model.`, for `seq_len` tokens.

        Raises: ConfigError naming the key, and the nearest known one when it is unknown.
        """
        try:
            return cls.fitted(cls.Config.model_validate(dict(values)), seq_len)
        except ValidationError as error:
            raise _keys_of_another_kind(error) or explain(
                error, cls.Config, prefix="model."
            ) from error

    @classmethod
    @abstractmethod
    def fitted(cls, config: Any, seq_len: int) -> LanguageModelConfig:
        """Return the configuration with values for unset keys that depend on `seq_len`.

        Raises: ConfigError with the key to set when the model does not support such sequences.
        """

    @classmethod
    def leanest(cls, config: Any) -> JsonObject:
        """Return keys with values that need less memory and change no result."""
        return {}

    @classmethod
    def on_meta(cls, config: LanguageModelConfig, ops: Ops) -> Self:
        """Return the model on the meta device, for counting and for loading weights into."""
        with torch.device("meta"), _Drawing():
            return cls(config, ops)

    @classmethod
    def num_parameters(cls, config: LanguageModelConfig) -> int:
        """Return the number of parameters of this configuration. Shared ones count once."""
        return sum(parameter.numel() for parameter in cls.on_meta(config, Ops.plain()).parameters())

    @classmethod
    def count_flops(cls, config: LanguageModelConfig, seq_len: int) -> Flops:
        """Return `flops_per_token` of this configuration."""
        return cls.on_meta(config, Ops.plain()).flops_per_token(seq_len)

    @final  # type: ignore[misc]  # nn.Module declares forward as an attribute
    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, doc_ids_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the targets, and how many are not ignored.

        With a `context`, all ranks that share rows are given whole ones, and return the loss of
        their own targets.

        Shapes:  tokens_BT (B, T) integers; targets_BT (B, T) int64, -1 where there is
                 nothing to predict; doc_ids_BT (B, T) integers.
        Returns: (loss_sum, num_valid), as `flatout.ops.cross_entropy.reference`.
        """
        hidden_BTD = self.through(self.blocks, None, tokens_BT, doc_ids_BT, self.context)
        return self.loss(hidden_BTD, targets_BT)

    def through(
        self,
        blocks: Iterable[nn.Module],
        hidden_BTD: Tensor | None,
        tokens_BT: Tensor,
        doc_ids_BT: Tensor | None,
        context: Context | None = None,
    ) -> Tensor:
        """Return the hidden states after some of the blocks. Without any before, embed the tokens.

        Shapes:  hidden_BTD (B, T, D), of this rank's tokens with a context; tokens_BT,
                 doc_ids_BT (B, T) integers, of whole rows.
        Returns: hidden_BTD.
        """
        embed: Any = self.embed  # a model that divides rows takes positions
        if context is None:
            hidden_BTD = embed(tokens_BT) if hidden_BTD is None else hidden_BTD
            shared = self.shared_by_blocks(tokens_BT, doc_ids_BT)
        else:
            if hidden_BTD is None:
                hidden_BTD = embed(context.own(tokens_BT), context.spans(tokens_BT.shape[1]))
            shared = (None, context)
        for block in blocks:
            hidden_BTD = block(hidden_BTD, doc_ids_BT, *shared)
        return hidden_BTD

    def loss(self, hidden_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `forward` from the hidden states after the blocks.

        Shapes:  hidden_BTD (B, T, D) of this rank's tokens; targets_BT (B, T) int64.
        Returns: (loss_sum, num_valid).
        """
        if self.context is not None:
            targets_BT = self.context.own(targets_BT)
        hidden_BTD, weight_VD = self.head(hidden_BTD)
        z_loss = self.config.z_loss if self.training else 0.0
        cross_entropy = self.ops.cross_entropy
        if self.split is not None:
            cross_entropy = partial(sharded, split=self.split)
        return cross_entropy(
            hidden_BTD, weight_VD, targets_BT, softcap=self.config.logit_softcap, z_loss=z_loss
        )

    def logits(self, tokens_BT: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
        """Return the logits at every position, for sampling and tests. Training calls `forward`.

        Shapes:  tokens_BT (B, T) integers; doc_ids_BT (B, T) integers.
        Returns: logits_BTV.
        """
        hidden_BTD, weight_VD = self.head(self.through(self.blocks, None, tokens_BT, doc_ids_BT))
        logits_BTV = logits_of(hidden_BTD, weight_VD)
        if self.split is not None:
            logits_BTV = self.split.gathered(logits_BTV, dim=2)
        return capped(logits_BTV, self.config.logit_softcap)

    def next_logits(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of the next token, without those of earlier positions.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        return self.last_logits(self.through(self.blocks, None, tokens_BT, None))

    def last_logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits of the next token, from the output of the blocks.

        Shapes:  hidden_BTD (B, T, D).
        Returns: logits_BV.
        """
        hidden_B1D, weight_VD = self.head(hidden_BTD[:, -1:])
        return capped(logits_of(hidden_B1D[:, 0], weight_VD), self.config.logit_softcap)

    def decoder(self, max_tokens: int | None = None) -> Decoder:
        """Return a decoder of at most `max_tokens` tokens. None means the limit of the model.

        This default works for any model and recomputes every token at each step. A model that can
        keep state returns its own decoder. One with a recurrent state needs no limit.
        """
        return RecomputingDecoder(self.next_logits, self.token_limit(max_tokens))

    def token_limit(self, max_tokens: int | None) -> int:
        """Return the decoder's token limit: `max_tokens`, capped at what the model supports."""
        return min(max_tokens or self.max_seq_len, self.max_seq_len)

    def shared_by_blocks(self, tokens_BT: Tensor, doc_ids_BT: Tensor | None) -> tuple[object, ...]:
        """Return further arguments of every block, computed once per micro-batch.

        Shapes:  tokens_BT, doc_ids_BT (B, T) integers.
        """
        return ()

    @abstractmethod
    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the first hidden states.

        Shapes:  tokens_BT (B, T) integers.
        Returns: hidden_BTD.
        Raises:  ShapeError when T is more than the model supports.
        """

    @abstractmethod
    def head(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised hidden states and the output weight.

        The loss multiplies them, so that all logits need not exist at once.

        Shapes:  hidden_BTD (B, T, D).
        Returns: (hidden_BTD, weight_VD).
        """

    def share_rows(self, context: Context, *, seq_len: int) -> None:
        """Let `forward` compute this rank's part of each row.

        Raises: ConfigError when the model does not support it, or rows cannot be divided.
        """
        if self.divides_rows is None:
            raise ConfigError(
                f"parallel.context={context.size} needs a model that divides rows, but "
                f"{type(self).__name__} does not.",
                fix="Remove parallel.context, or choose model.kind=transformer or eigenstate.",
            )
        context.spans(seq_len)
        self.context = context

    def tensor_cuts(self) -> dict[str, Cut]:
        """Return how ranks share parameters, by name. The others are whole on every rank.

        An empty dictionary means that ranks cannot share layers. They are cut before they are
        drawn, so the class must state `draws_everything`.
        """
        return {}

    def share_layers(self, split: Split, *, seq_len: int) -> None:
        """Let `forward` compute this rank's part of each layer, once `tensor.cut` has cut it.

        Raises: ConfigError when the model does not support it, or the ranks cannot divide it.
        """
        cuts = self.tensor_cuts()
        if not cuts or not vars(type(self)).get("draws_everything"):
            raise ConfigError(
                f"parallel.tensor={split.size} needs a model with tensor_cuts() and "
                f"draws_everything, but {type(self).__name__} lacks one of them.",
                fix="Remove parallel.tensor, or choose model.kind=transformer or eigenstate.",
            )
        self.check_shares(split, "model.vocab_size", self.config.vocab_size)
        self.check_shares(split, "data.seq_len", seq_len)
        for name, module in self.named_modules():
            found = cuts.get(f"{name}.weight")
            if found is None:
                continue
            if not isinstance(module, Linear):
                module.split = split  # an embedding
            elif found.dim == 1:
                module.after = split.reduced
            elif not name.startswith("unembedding"):
                module.before = split.gathered
        self.split = split

    def check_shares(self, split: Split, name: str, count: int, *, grows: bool = True) -> None:
        """Check that the ranks can divide a number, which could be larger if it `grows`.

        Raises: ConfigError.
        """
        if count % split.size:
            nearest = f"{name}={-(-count // split.size) * split.size}, or " if grows else ""
            raise ConfigError(
                f"{name}={count} cannot be divided among the ranks of "
                f"parallel.tensor={split.size}.",
                fix=f"Set {nearest}parallel.tensor to a divisor of {count}.",
            )

    @abstractmethod
    def init_weights(self) -> None:
        """Initialise every parameter from torch's generator, also after `to_empty`."""

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by name, without those of LoRA adapters."""
        for name, parameter in self.named_parameters():
            if ".adapters." not in name:
                yield name, parameter

    @property
    @abstractmethod
    def max_seq_len(self) -> int:
        """The longest sequence that the model accepts."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the training FLOPs per token in sequences of `seq_len`."""

    def shared_bytes(self, seq_len: int) -> float:
        """Return the bytes that a rank sends to each other one per token, where they share rows.

        Forward and backward of a model in bf16, whose rank has `seq_len` tokens of a row.
        """
        return 0.0

    @abstractmethod
    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Return the kind of every parameter by its name."""

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Return the row counts of the parts of each hidden matrix that stacks several, by name.

        An optimizer that treats matrices as a whole splits such a matrix into its parts.
        """
        return {}


class EmbeddingModel(LanguageModel):
    """A model with embeddings of tokens and positions, a final norm, and an output weight.

    A subclass creates them in its constructor, in the order in which their weights are drawn.
    """

    token_embedding: Embedding
    position_embedding: Embedding | None
    """A vector per position, when positions are learned."""
    final_norm: nn.Module
    unembedding: Linear | None
    """The separate output weight. None when the embedding is the output weight too."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    dropout: float = 0.0
    """Share of components of the embedding that are dropped in training."""

    def embed(self, tokens_BT: Tensor, spans: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Return the embedding of each token, plus that of its position when positions are learned.

        The positions are those of `spans`, as (start, end). None means from 0 on.

        Shapes:  tokens_BT (B, T) integers.
        Returns: hidden_BTD.
        Raises:  ShapeError when there is no position for a token.
        """
        spans = spans or [(0, tokens_BT.shape[1])]
        check_length(spans[-1][1], self.max_seq_len)
        hidden_BTD = self.token_embedding(tokens_BT)
        if self.split is not None:
            spans = self.split.spans(tokens_BT.shape[1])
        if self.position_embedding is not None:
            weight = local(self.position_embedding.weight)
            hidden_BTD = hidden_BTD + torch.cat([weight[start:end] for start, end in spans])
        return dropped(hidden_BTD, self.dropout, self.training)

    def head(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised hidden states and the output weight.

        Shapes:  hidden_BTD (B, T, D).
        Returns: (hidden_BTD, weight_VD).
        """
        output = self.token_embedding if self.unembedding is None else self.unembedding
        hidden_BTD = self.final_norm(hidden_BTD)
        if self.logit_scale != 1:
            hidden_BTD = hidden_BTD * self.logit_scale
        if self.split is not None:
            hidden_BTD = self.split.gathered(hidden_BTD)
        return hidden_BTD, local(output.weight)

    def init_weights(self) -> None:
        """Initialise every parameter: matrices normal(0, 0.02), biases 0, norms 1.

        The two matrices of a block that add to the hidden states, `output` and `down`, get 0.02 /
        sqrt(2 L), so that the sum over the blocks does not grow with their number. Source: GPT-2
        (Radford et al. 2019, section 2.3).
        """
        residual_std = INIT_STD / math.sqrt(2 * len(self.blocks))
        stds = {"output": residual_std, "down": residual_std} | self.own_stds()
        for name, parameter in self.own_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                last = name.removesuffix(".weight").rpartition(".")[-1]
                nn.init.normal_(parameter, std=stds.get(last, INIT_STD))

    def own_stds(self) -> dict[str, float]:
        """Return the standard deviations of other matrices, by the last part of their names."""
        return {}

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Return the kind of every parameter by its name. A tied head is an embedding."""
        return {name: kind_by_name(name, parameter) for name, parameter in self.named_parameters()}

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Return the row counts of the parts of each matrix that stacks several, by name."""
        return {
            name: rows
            for name, _ in self.named_parameters()
            for ending, rows in self.stacked_by_ending().items()
            if name.endswith(ending)
        }

    def cuts_by_ending(self, cuts: Mapping[str, tuple[int, tuple[int, ...]]]) -> dict[str, Cut]:
        """Return `tensor_cuts` of layers and parameters by the ending of their names.

        A bias is cut with the rows of its weight. The vocabulary is cut, too.
        """
        vocabulary = (0, (self.config.vocab_size,))
        cuts = {**cuts, "token_embedding": vocabulary, "unembedding": vocabulary}
        return {
            name: Cut(dim, parts)
            for name, parameter in self.named_parameters()
            for ending, (dim, parts) in cuts.items()
            if name.removesuffix(".weight").removesuffix(".bias").endswith(ending)
            and dim < parameter.dim()
        }

    @abstractmethod
    def stacked_by_ending(self) -> dict[str, tuple[int, ...]]:
        """Return the row counts for `stacked_rows`, by the ending of the parameter name."""

    def matmul_flops(self) -> int:
        """Return the training FLOPs per token of the matmuls with hidden matrices and the head.

        Each weight of a matmul costs 2 FLOPs forward and 4 backward: 6 N in all, also for a
        tied head. A frozen weight needs no gradient and costs 4. The embedding look-up is not a
        product.
        """
        kinds = self.parameter_kinds()
        hidden = [p for name, p in self.named_parameters() if kinds[name] == "hidden"]
        products = [*hidden, self.token_embedding.weight]
        return sum((6 if p.requires_grad else 4) * p.numel() for p in products)

    def new_unembedding(self, *, tied: bool) -> Linear | None:
        """Return a separate output weight, or None when it is tied to the embedding."""
        vocab_size, width = self.token_embedding.weight.shape
        return None if tied else Linear(width, vocab_size, bias=False, ops=self.ops)


def model_of(
    config: RunConfig, *, vocab_size: int | None = None
) -> tuple[type[LanguageModel], LanguageModelConfig]:
    """Return the class that `model.kind` names and its checked configuration.

    `vocab_size` replaces model.vocab_size.
    Raises: ConfigError as `LanguageModel.check`.
    """
    model_class: type[LanguageModel] = MODELS.get(config.model.kind)
    keys = config.model.own() | {"vocab_size": vocab_size or config.model.vocab_size}
    return model_class, model_class.check(keys, seq_len=config.data.seq_len)


def new_model(config: RunConfig, ops: Ops) -> LanguageModel:
    """Return the model of a configuration on the meta device, if its class allows it.

    Any other is built on the CPU: it may compute buffers in its constructor, or draw otherwise.
    """
    model_class, model_config = model_of(config)
    if not vars(model_class).get("draws_everything"):
        return model_class(model_config, ops)
    return model_class.on_meta(model_config, ops)


def allocate(
    model: LanguageModel,
    device: torch.device | str,
    *,
    draws: bool,
    weights_device: torch.device | str | None = None,
) -> None:
    """Move a model that `new_model` returned to `device`. With `draws`, draw its weights.

    Only its buffers are moved there if its weights have a `weights_device`.

    Every rank draws whole tensors on the CPU, one by one in the order of `init_weights`, and keeps
    its part: the values depend neither on the device nor on the number of ranks. Without `draws`
    the weights are arbitrary. Cost: about a second per 100 million weights drawn; memory for the
    rank's part of the model, and for its largest tensor.
    """
    is_meta = any(parameter.is_meta for parameter in model.parameters())

    def moved(tensor: Tensor) -> Tensor:
        is_weight = isinstance(tensor, nn.Parameter)
        target = weights_device if is_weight and weights_device is not None else device
        if not is_meta:
            return tensor.to(target)
        if is_shared(tensor):
            return torch.empty_like(tensor, device=target)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=target)

    model._apply(moved)  # type: ignore[no-untyped-call]
    if is_meta and draws:
        cuts = model.tensor_cuts()
        drawing = _Drawing({p: cuts.get(name) for name, p in model.named_parameters()})
        with completed(model), drawing:  # what others have is drawn, too, and not kept
            model.init_weights()
            for name, module in model.named_modules():
                if name.rpartition(".")[0].endswith(".adapters"):
                    module.init_weights()


def kind_by_name(name: str, parameter: Tensor) -> ParameterKind:
    """Return the kind of a parameter by flatout's naming conventions.

    Tables have `embedding` in their names. The untied output weight is `unembedding`.

    Shapes:  parameter any.
    """
    if name.startswith("unembedding"):
        return "head"
    if "embedding" in name:
        return "embedding"
    return "hidden" if parameter.dim() == 2 else "vector"


def _keys_of_another_kind(error: ValidationError) -> ConfigError | None:
    """Return the error for keys that belong to another built-in model, or None."""
    unknown = [str(one["loc"][0]) for one in error.errors() if one["type"] == "extra_forbidden"]
    others = [
        kind
        for kind in MODELS.names()
        if unknown and set(unknown) <= MODELS.get(kind).Config.model_fields.keys()
    ]
    if not others:
        return None
    keys = " and ".join(f"model.{key}" for key in unknown)
    return ConfigError(
        f"The requested model.kind has no {keys}. The model {others[0]!r} does.",
        fix="Remove it. If a recipe sets it, start from a recipe for the kind that you want, or "
        "write your own.",
    )
