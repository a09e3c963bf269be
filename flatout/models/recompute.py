"""Activation checkpointing: layers keep less for backward, which recomputes the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from flatout.errors import ConfigError
from flatout.models.language_model import LanguageModel


def recompute_layers(model: LanguageModel, **options: Any) -> None:
    """Wrap each layer in torch's `checkpoint` with these options. Parameter names do not change.

    Raises: ConfigError for an adapted module that has no list of layers.
    """
    if model.layers[0] is getattr(model, "module", None):
        raise ConfigError(
            f"Activation checkpointing recomputes layers one by one, and {type(model).__name__} "
            "has no nn.ModuleList of several modules.",
            fix="Keep its layers in an nn.ModuleList, or remove checkpointing from speedups.",
        )

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        # dynamo traces a function that calls `checkpoint`, and no partial of it
        def call(*inputs: Any, **named: Any) -> Any:
            return checkpoint(forward, *inputs, use_reentrant=False, **options, **named)

        return call

    for layer in model.layers:
        layer.forward = recomputed(layer.forward)
