"""What every language model is: one forward that holds the loss, made of parts that can be taken
apart.

Letters: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, final

import torch
from pydantic import Field, ValidationError
from torch import Tensor, nn

from flatout.config.schema import RunConfig, explain
from flatout.config.sections import Section
from flatout.errors import ConfigError
from flatout.models.decoding import Decoder, Recomputing
from flatout.ops import Ops
from flatout.ops.cross_entropy import capped
from flatout.registry import MODELS

ParameterKind = Literal["hidden", "embedding", "head", "vector"]
"""hidden: a matrix between activations; embedding: a table of rows; head: the output weight;
vector: a norm or a bias.
"""


@dataclass(frozen=True)
class Flops:
    """Training FLOPs a token: the forward pass and its backward pass, which costs twice as much.
    Matrix products only.
    """

    palm: int
    """Every query against all T keys: the convention MFU is usually given in (Chowdhery et al.
    2022, arXiv:2204.02311, appendix B).
    """
    causal_exact: Fraction
    """Every query against the keys it may see: the least a causal model can do."""


class LanguageModelConfig(Section):
    """What every model's configuration has."""

    vocab_size: int = Field(ge=1)
    """Rows of the embedding (V)."""
    logit_softcap: float | None = Field(None, gt=0)
    """Logits are held within plus and minus this by a tanh; None leaves them."""
    z_loss: float = Field(0.0, ge=0)
    """Weight in training of the square of the logarithm of the softmax's denominator; a small one,
    such as 1e-4, keeps logits from drifting.
    """


class LanguageModel(nn.Module, ABC):
    """Embedding, blocks, head. `forward` contains the loss and is the only thing that is compiled,
    wrapped and called in training.
    """

    Config: ClassVar[type[LanguageModelConfig]]
    """The model's own configuration keys."""
    config: LanguageModelConfig
    blocks: nn.ModuleList
    """Called in order, each as block(hidden_BTD, doc_ids_BT) -> hidden_BTD."""
    compiler_options: Mapping[str, bool] = MappingProxyType({})
    """What the compiler is asked for besides, where the model is compiled: options of
    torch.compile's own backend.
    """

    def __init__(self, config: LanguageModelConfig, ops: Ops) -> None:
        super().__init__()
        self.config = config
        self.ops = ops

    @classmethod
    def check(cls, values: Mapping[str, Any], *, seq_len: int) -> LanguageModelConfig:
        """Return the checked configuration of this model from the keys under `model.`, for windows
        of `seq_len` tokens.

        Raises: ConfigError naming the key, and the nearest known one when it is unknown.
        """
        try:
            return cls.fitted(cls.Config.model_validate(dict(values)), seq_len)
        except ValidationError as error:
            raise _of_another_kind(error) or explain(error, cls.Config, prefix="model.") from error

    @classmethod
    @abstractmethod
    def fitted(cls, config: Any, seq_len: int) -> LanguageModelConfig:
        """Return the configuration with what it leaves open settled for windows of `seq_len`
        tokens.

        Raises: ConfigError with the key to set when the model could not hold such a window.
        """

    @classmethod
    def leanest(cls, config: Any) -> Mapping[str, Any]:
        """Return the keys whose values take more memory than they must and change no result, with
        values that take little.
        """
        return {}

    @classmethod
    def on_meta(cls, config: LanguageModelConfig, ops: Ops) -> Self:
        """Return the model with shapes and no memory: for counting, and for loading weights into."""
        with torch.device("meta"):
            return cls(config, ops)

    @classmethod
    def num_parameters(cls, config: LanguageModelConfig) -> int:
        """Return how many parameters a model of this configuration has; a shared one counts once."""
        return sum(parameter.numel() for parameter in cls.on_meta(config, Ops.plain()).parameters())

    @classmethod
    def count_flops(cls, config: LanguageModelConfig, seq_len: int) -> Flops:
        """Return `flops_per_token` of a model of this configuration, without making one."""
        return cls.on_meta(config, Ops.plain()).flops_per_token(seq_len)

    @final  # type: ignore[misc]  # nn.Module declares forward as an attribute
    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, doc_ids_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the targets and how many of them counted.

        Shapes:  tokens_BT (B, T) integers; targets_BT (B, T) int64, -1 where nothing is to be
                 predicted; doc_ids_BT (B, T) integers.
        Returns: (loss_sum, num_valid), as `flatout.ops.cross_entropy.reference`.
        """
        hidden_BTD, weight_VD = self.head(self._through_blocks(tokens_BT, doc_ids_BT))
        z_loss = self.config.z_loss if self.training else 0.0
        return self.ops.cross_entropy(
            hidden_BTD, weight_VD, targets_BT, softcap=self.config.logit_softcap, z_loss=z_loss
        )

    def logits(self, tokens_BT: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
        """Return the scores of every next token at every position; for sampling and tests, never in
        training.

        Shapes:  tokens_BT (B, T) integers; doc_ids_BT (B, T) integers.
        Returns: logits_BTV.
        """
        hidden_BTD, weight_VD = self.head(self._through_blocks(tokens_BT, doc_ids_BT))
        return capped(nn.functional.linear(hidden_BTD, weight_VD), self.config.logit_softcap)

    def next_logits(self, tokens_BT: Tensor) -> Tensor:
        """Return the scores of the token after the last: `logits` without the positions sampling
        throws away.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BV.
        """
        return self.last_logits(self._through_blocks(tokens_BT, None))

    def last_logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the scores of the token after the last, from what the blocks made of the tokens.

        Shapes:  hidden_BTD (B, T, D).
        Returns: logits_BV.
        """
        hidden_B1D, weight_VD = self.head(hidden_BTD[:, -1:])
        return capped(nn.functional.linear(hidden_B1D[:, 0], weight_VD), self.config.logit_softcap)

    def decoder(self, max_tokens: int | None = None) -> Decoder:
        """Return a reader of one text a row, of at most `max_tokens` tokens; None is as many as the
        model takes.

        This one works for any model and computes every token anew for each. A model that can keep
        what it has read returns a decoder of its own; one with a recurrent state need not limit how
        much it reads.
        """
        return Recomputing(self.next_logits, self.at_most(max_tokens))

    def at_most(self, max_tokens: int | None) -> int:
        """Return how many tokens in a row a decoder reads of which `max_tokens` are asked for."""
        return min(max_tokens or self.max_seq_len, self.max_seq_len)

    def _through_blocks(self, tokens_BT: Tensor, doc_ids_BT: Tensor | None) -> Tensor:
        hidden_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, doc_ids_BT)
        return hidden_BTD

    @abstractmethod
    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the first hidden states.

        Shapes:  tokens_BT (B, T) integers.
        Returns: hidden_BTD.
        Raises:  ShapeError when T is more than the model can hold.
        """

    @abstractmethod
    def head(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised hidden states and the output weight; the loss multiplies them, so
        that whole logits need not exist.

        Shapes:  hidden_BTD (B, T, D).
        Returns: (hidden_BTD, weight_VD).
        """

    @abstractmethod
    def init_weights(self) -> None:
        """Fill every parameter anew from torch's generator; a model made on the meta device needs
        it after `to_empty`.
        """

    @property
    @abstractmethod
    def max_seq_len(self) -> int:
        """Most tokens in a row that the model takes."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> Flops:
        """Return the training FLOPs a token in windows of `seq_len`."""

    @abstractmethod
    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Return the kind of every parameter by its name."""

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Return, for each hidden matrix that is several stacked ones, the rows of each: what
        treats a matrix as a whole splits it so.
        """
        return {}


def model_of(
    config: RunConfig, *, vocab_size: int | None = None, seq_len: int | None = None
) -> tuple[type[LanguageModel], LanguageModelConfig]:
    """Return the class that `model.kind` names and its checked configuration.

    `vocab_size` and `seq_len` replace model.vocab_size and data.seq_len.
    Raises: ConfigError as `LanguageModel.check`.
    """
    model_class: type[LanguageModel] = MODELS.get(config.model.kind)
    keys = config.model.own() | {"vocab_size": vocab_size or config.model.vocab_size}
    return model_class, model_class.check(keys, seq_len=seq_len or config.data.seq_len)


def kind_by_name(name: str, parameter: Tensor) -> ParameterKind:
    """Return what a parameter is where names follow the house: tables end in `embedding`, the
    untied output is `unembedding`.

    Shapes:  parameter any.
    """
    if name.startswith("unembedding"):
        return "head"
    if "embedding" in name:
        return "embedding"
    return "hidden" if parameter.dim() == 2 else "vector"


def _of_another_kind(error: ValidationError) -> ConfigError | None:
    """The answer to keys of another model of the registry: as when `model.kind` is stated over a
    recipe for that one.
    """
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
        f"The model.kind that is asked for has no {keys}, which the model {others[0]!r} has.",
        fix="Leave that out; where a recipe states it, begin from a recipe for the kind that you want, or one of your own.",
    )
