"""Models of other projects in the training step of throughput.py, imported from their own code.

Each function builds a model at the given shape and returns its loss and its optimiser, set up as
its project does. Matmuls run in bfloat16 under autocast, except in the hand-written loop (`people`)
and in nanochat, which casts by itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.models.transformer import Transformer, TransformerConfig
from flatout.ops import Ops
from flatout.ops.cross_entropy import fused

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1


@dataclass(frozen=True)
class Order:
    """The shape and settings that a peer must build."""

    shape: TransformerConfig
    seq_len: int
    lr: float
    device: torch.device
    compiled: bool
    folder: Path | None
    """Folder with its sources; None if it is installed."""


@dataclass(frozen=True)
class Peer:
    """A model ready to train."""

    parameters: list[nn.Parameter]
    loss: Callable[[Tensor, Tensor], Tensor]
    """(tokens_BT, targets_BT) -> the mean loss."""
    optimizers: list[torch.optim.Optimizer]
    products: AbstractContextManager[Any]
    """Context of the forward pass."""
    each_step: Callable[[Tensor], Any] = lambda loss: None
    """Called with the loss after each update."""


def nanogpt(order: Order) -> Peer:
    """Return nanoGPT's GPT with its own parameter groups and its fused AdamW."""
    module = file_module("nanogpt_model", _folder(order) / "model.py")
    shape = order.shape
    sizes = {
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_embd": shape.d_model,
        "vocab_size": shape.vocab_size,
    }
    model = module.GPT(
        module.GPTConfig(block_size=order.seq_len, dropout=0.0, bias=shape.bias, **sizes)
    ).to(order.device)
    optimizer = model.configure_optimizers(WEIGHT_DECAY, order.lr, BETAS, order.device.type)
    called = _called(model, order)
    return Peer(
        list(model.parameters()),
        lambda tokens, targets: called(tokens, targets)[1],
        [optimizer],
        _bf16(order),
    )


def huggingface(order: Order) -> Peer:
    """Return Hugging Face's GPT-2 with scaled-dot-product attention and fused AdamW."""
    transformers: Any = importlib.import_module("transformers")
    shape = order.shape
    sizes = {
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_embd": shape.d_model,
        "vocab_size": shape.vocab_size,
    }
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        n_positions=order.seq_len, use_cache=False, attn_implementation="sdpa", **sizes, **dropouts
    )
    model = transformers.GPT2LMHeadModel(config).to(order.device).train()
    called = _called(model, order)
    # The model shifts the labels itself, so it gets the inputs; the last token has no target.
    return Peer(
        list(model.parameters()),
        lambda tokens, _: called(input_ids=tokens, labels=tokens).loss,
        [_adamw(model, order)],
        _bf16(order),
    )


def litgpt(order: Order) -> Peer:
    """Return the model of litgpt that is closest to GPT-2, with fused AdamW.

    It has norms with learned gains, biases and a GELU MLP.
    """
    with _found_in(order.folder):
        found: Any = importlib.import_module("litgpt.model")
        settings: Any = importlib.import_module("litgpt.config")
    shape = order.shape
    sizes = {
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_embd": shape.d_model,
        "block_size": order.seq_len,
    }
    kinds = {
        "norm_class_name": "LayerNorm",
        "mlp_class_name": "GptNeoxMLP",
        "parallel_residual": False,
        "bias": shape.bias,
    }
    config = settings.Config(
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        intermediate_size=shape.mlp_width,
        **sizes,
        **kinds,
    )
    model = found.GPT(config)
    model.apply(functools.partial(_gpt2_weights, std=0.02))
    model = model.to(order.device)
    model.max_seq_length = order.seq_len
    called = _called(model, order)

    def loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return functional.cross_entropy(called(tokens_BT).flatten(0, 1), targets_BT.flatten())

    return Peer(list(model.parameters()), loss, [_adamw(model, order)], _bf16(order))


def nanochat(order: Order) -> Peer:
    """Return nanochat's model of this depth and width with its own Muon and rates.

    It has heads of 128 where they fit.
    """
    with _found_in(order.folder):
        module: Any = importlib.import_module("nanochat.gpt")
    shape = order.shape
    heads = max(shape.d_model // 128, 1)
    sizes = {
        "n_layer": shape.num_layers,
        "n_head": heads,
        "n_kv_head": heads,
        "n_embd": shape.d_model,
        "vocab_size": shape.vocab_size,
    }
    with torch.device("meta"):
        model = module.GPT(module.GPTConfig(sequence_len=order.seq_len, **sizes))
    model.to_empty(device=order.device)
    model.init_weights()
    made = (
        model.setup_optimizer() if hasattr(model, "setup_optimizer") else model.setup_optimizers()
    )
    return Peer(
        list(model.parameters()),
        _called(model, order),
        list(made) if isinstance(made, list | tuple) else [made],
        nullcontext(),
    )


def people(order: Order) -> Peer:
    """Return a typical hand-written loop: fp32, eager, full attention matrix, unfused AdamW.

    It calls `.item()` at each step.
    """
    torch.set_float32_matmul_precision("highest")
    model = Transformer(order.shape, Ops.plain(cross_entropy=fused)).to(order.device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=order.lr,
        betas=BETAS,
        weight_decay=WEIGHT_DECAY,
        foreach=False,
        fused=False,
    )

    def loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss_sum, num_valid = model(tokens_BT, targets_BT)
        return loss_sum / num_valid

    return Peer(list(model.parameters()), loss, [optimizer], nullcontext(), Tensor.item)


PEERS: dict[str, Callable[[Order], Peer]] = {
    "nanogpt": nanogpt,
    "huggingface": huggingface,
    "litgpt": litgpt,
    "nanochat": nanochat,
    "people": people,
}


def step(peer: Peer, tokens_BT: Tensor, targets_BT: Tensor, clip: float) -> Tensor:
    """Take one training step: forward, backward, clip, update; return the loss on the device.

    Shapes: tokens_BT, targets_BT (B, T) int64.
    """
    with peer.products:
        loss = peer.loss(tokens_BT, targets_BT)
    loss.backward()
    if clip > 0:
        nn.utils.clip_grad_norm_(peer.parameters, clip)
    for optimizer in peer.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    peer.each_step(loss)
    return loss.detach()


def file_module(name: str, path: Path) -> ModuleType:
    """Import a file under a given name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018  # true of every path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def _folder(order: Order) -> Path:
    assert order.folder is not None  # entries without a folder were skipped
    return order.folder


@contextmanager
def _found_in(folder: Path | None) -> Iterator[None]:
    """Put a folder on the import path; None changes nothing."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    yield


def _called(model: nn.Module, order: Order) -> Any:
    return torch.compile(model, dynamic=False) if order.compiled else model


def _bf16(order: Order) -> AbstractContextManager[Any]:
    return torch.autocast(order.device.type, dtype=torch.bfloat16)


def _adamw(model: nn.Module, order: Order) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    plain = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=order.lr, betas=BETAS, fused=True)


def _gpt2_weights(module: nn.Module, *, std: float) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]


if __name__ == "__main__":
    raise SystemExit(
        "This file belongs to benchmarks/throughput.py; run: python benchmarks/throughput.py --help"
    )
