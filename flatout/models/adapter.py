"""Adapts a user's torch module as a language model without rewriting it: `MODEL = adapt(build)`.

Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from traceback import extract_tb
from typing import Any, ClassVar

import torch
from pydantic import create_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flatout.config.registry import is_user_code
from flatout.errors import ConfigError, ShapeError
from flatout.models.language_model import Flops, LanguageModel, LanguageModelConfig, ParameterKind
from flatout.ops import Ops
from flatout.ops.cross_entropy import capped, of_logits

ANY_LENGTH = 1_000_000
EXAMPLE = "def build(vocab_size: int, block_size: int = 256, width: int = 64): return MyModule(...)"

TARGETS = re.compile("targ|label|tgt|^y$")
"""Names of the second parameter of `forward` that gets the tokens. An optional one of a different
name, such as a mask, does not.
"""


class AdaptedModel(LanguageModel):
    """Runs a module whose `forward(idx, targets)` or `forward(idx)` returns logits.

    The logits may be the first element of a tuple. The loss is computed from them. A loss that the
    module returns is ignored.
    """

    USES: ClassVar[tuple[str, ...]] = ()
    """The module uses none of flatout's ops, so speedups that replace ops do not apply."""
    build: ClassVar[Callable[..., nn.Module]]
    limit: ClassVar[str | None] = None

    def __init__(self, config: LanguageModelConfig, ops: Ops) -> None:
        super().__init__(
            config,
            replace(
                ops,
                cross_entropy=lambda logits_BTV, _weight, targets_BT, **options: of_logits(
                    logits_BTV, targets_BT, **options
                ),
            ),
        )
        self.module = self._built()
        self.blocks = nn.ModuleList([_SingleDocument()])
        parameters = [*inspect.signature(self.module.forward).parameters.values()]
        self._takes_targets = any(
            one.kind is one.POSITIONAL_OR_KEYWORD
            and (one.default is one.empty or TARGETS.search(one.name))
            for one in parameters[1:2]
        )

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The modules in the module's largest list, or itself when it has none of several."""
        lists = (
            one for one in self.module.modules() if isinstance(one, nn.ModuleList) and len(one) > 1
        )
        return [
            *max(
                lists,
                key=lambda one: sum(p.numel() for p in one.parameters()),
                default=[self.module],
            )
        ]

    def _built(self) -> nn.Module:
        base = set(LanguageModelConfig.model_fields) - {"vocab_size"}
        built = type(self).build(**self.config.model_dump(exclude=base))
        if not isinstance(built, nn.Module):
            raise ConfigError(
                f"build() of the adapted model returned {type(built).__name__}, not an nn.Module.",
                fix=f"Write it as {EXAMPLE}.",
            )
        return built

    @classmethod
    def fitted(cls, config: Any, seq_len: int) -> LanguageModelConfig:
        """Return the configuration unchanged.

        Raises: ConfigError when `seq_len` exceeds what the module supports.
        """
        if cls.limit and seq_len > (limit := getattr(config, cls.limit)):
            raise ConfigError(
                f"data.seq_len={seq_len} exceeds model.{cls.limit}={limit}.",
                fix=f"Set model.{cls.limit}={seq_len}.",
            )
        return config  # type: ignore[no-any-return]

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the module accepts: the value of the key that `limit` names."""
        return int(getattr(self.config, self.limit)) if self.limit else ANY_LENGTH

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the module's logits.

        Modules such as nanoGPT's return logits at every position only when they get targets, so the
        tokens are passed as targets.

        Shapes:  tokens_BT (B, T) integers.
        Returns: logits_BTV.
        Raises:  ShapeError when T exceeds what the module supports, or the module does not return
                 logits.
        """
        if tokens_BT.shape[1] > self.max_seq_len:
            raise ShapeError(
                f"A sequence of {tokens_BT.shape[1]} tokens exceeds "
                f"model.{self.limit}={self.max_seq_len}.",
                fix="Pass fewer tokens.",
            )
        tokens_BT = tokens_BT.long()
        inputs = (tokens_BT, tokens_BT) if self._takes_targets else (tokens_BT,)
        outputs = self.module(*inputs)
        logits_BTV = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
        expected = (*tokens_BT.shape, self.config.vocab_size)
        if not isinstance(logits_BTV, Tensor) or logits_BTV.shape != expected:
            actual = (
                tuple(logits_BTV.shape)
                if isinstance(logits_BTV, Tensor)
                else type(logits_BTV).__name__
            )
            raise ShapeError(
                f"forward() of {type(self.module).__name__} returned {actual} instead of logits of "
                f"shape {expected}.",
                fix="Return logits, or (logits, loss), with model.vocab_size logits at every "
                "position.",
            )
        return logits_BTV

    def head(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits unchanged, and an empty weight.

        Shapes:  hidden_BTD (B, T, V).
        """
        return hidden_BTD, hidden_BTD.new_empty(0)

    def logits(self, tokens_BT: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
        """Return the module's logits. There is no separate output weight.

        Shapes:  as `LanguageModel.logits`.
        """
        return capped(
            self.through(self.blocks, None, tokens_BT, doc_ids_BT), self.config.logit_softcap
        )

    def last_logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits of the last position.

        Shapes:  hidden_BTD (B, T, V).
        """
        return capped(hidden_BTD[:, -1], self.config.logit_softcap)

    def init_weights(self) -> None:
        """Copy the weights of a newly built module."""
        self.module.load_state_dict(self._built().state_dict())

    def flops_per_token(self, seq_len: int) -> Flops:
        """Return torch's count of the FLOPs of the module's forward pass, times 3 for training.

        The count covers matmuls and attention, masked scores included, so both numbers
        follow PaLM's convention. Custom kernels are not counted.
        Raises: ConfigError when the module creates a tensor on a different device than its input.
        """
        twin = type(self).on_meta(self.config, self.ops)
        with FlopCounterMode(display=False) as counter:
            try:
                twin.embed(torch.zeros(1, seq_len, dtype=torch.int64, device="meta"))
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error):
                    raise
                lines = [f for f in extract_tb(error.__traceback__) if is_user_code(f.filename)]
                at = f"{lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line}: " if lines else ""
                raise ConfigError(
                    f"{at}the model uses a tensor that is not on the device of its input.",
                    fix="Create tensors there: torch.zeros(..., device=tokens.device), or "
                    "x.new_zeros(...). Register constants with register_buffer.",
                ) from error
        per_token = Fraction(3 * counter.get_total_flops(), seq_len)
        return Flops(round(per_token), per_token)

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Return the kind of each parameter by its module: tables are embeddings.

        The weight of a linear layer with V outputs is the head.
        """
        kinds: dict[str, ParameterKind] = {}
        for name, parameter in self.named_parameters():
            module = self.get_submodule(name.rpartition(".")[0])
            if isinstance(module, nn.Embedding):
                kinds[name] = "embedding"
            elif parameter.dim() < 2:
                kinds[name] = "vector"
            else:
                is_output = (
                    isinstance(module, nn.Linear) and module.out_features == self.config.vocab_size
                )
                # Other shapes, such as those of convolutions, get weight decay but not Muon.
                kinds[name] = "head" if is_output or parameter.dim() > 2 else "hidden"
        return kinds


class _SingleDocument(nn.Module):
    """Returns its input, and rejects document ids, which the module cannot use."""

    def forward(self, hidden_BTD: Tensor, doc_ids_BT: Tensor | None = None) -> Tensor:
        if doc_ids_BT is not None:
            raise ConfigError(
                "An adapted model cannot mask attention between documents.",
                fix="Set data.document_mask=false.",
            )
        return hidden_BTD


def adapt(build: Callable[..., nn.Module], *, limit: str | None = None) -> type[LanguageModel]:
    """Return a model class that wraps the modules of `build`, for `model.kind=my_module:MODEL`.

    The parameters of `build` become the keys under `model.`: `vocab_size`, and others that must
    have defaults. `limit` is the name of the parameter that sets the longest sequence, such as
    block_size. None means no limit.
    Raises: ConfigError when `build` lacks the parameter `vocab_size` or `limit`, or a default, or
            has one with the name of a key of every model.
    """
    parameters = inspect.signature(build, eval_str=True).parameters
    required = [
        name
        for name, one in parameters.items()
        if one.default is one.empty and name != "vocab_size"
    ]
    taken = {*LanguageModelConfig.model_fields} & parameters.keys() - {"vocab_size"}
    if taken or "vocab_size" not in parameters or required or (limit and limit not in parameters):
        missing = limit if limit and limit not in parameters else "vocab_size"
        problem = f"no default for {required[0]!r}" if required else f"no parameter {missing!r}"
        if taken:
            problem = f"the parameter {min(taken)!r}, which flatout applies to every model's logits"
        raise ConfigError(
            f"adapt() cannot use {getattr(build, '__name__', build)}: it has {problem}.",
            fix=f"Write it as {EXAMPLE}.",
        )
    keys: dict[str, Any] = {
        name: (type(one.default) if one.annotation is one.empty else one.annotation, one.default)
        for name, one in parameters.items()
        if name != "vocab_size"
    }
    config = create_model("AdaptedConfig", __base__=LanguageModelConfig, **keys)
    return type(
        getattr(build, "__name__", "Adapted"),
        (AdaptedModel,),
        {
            "Config": config,
            "build": staticmethod(build),
            "limit": limit,
            "__module__": build.__module__,
        },
    )
