"""An eigenstate network that flatout trained, as a model of transformers. Needs torch, not flatout.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Generation computes the whole text for each token: the work per token grows with the text.

Letters: B rows, T tokens, D width, K eigenstates, E = 2 K: K real parts, then K imaginary parts.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

CHUNK = 32
"""Tokens that the recurrence processes at once; no result depends on it."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""The initial angles are multiples of this fraction of a circle."""
RESONANCE = 0.01
"""Factor of the coupling between eigenstates."""


class FlatoutConfig(PretrainedConfig):
    """The configuration: `model` has flatout's own keys, which its documentation explains."""

    model_type = "flatout"

    def __init__(self, model: dict | None = None, **others) -> None:
        self.model = model or {}
        super().__init__(**others)


class LayerNorm(nn.Module):
    """Layer normalisation with an optional bias."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, hidden):
        """Return the normalised hidden states."""
        bias = None if self.bias is None else self.bias.float()
        shape = self.weight.shape
        normed = functional.layer_norm(hidden.float(), shape, self.weight.float(), bias, 1e-5)
        return normed.to(hidden.dtype)


class Memory(nn.Module):
    """Eigenstates that are driven by the means of every `scale` tokens."""

    def __init__(self, num_eigenstates: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.log_rate = nn.Parameter(torch.zeros(num_eigenstates))
        self.detuning = nn.Parameter(torch.zeros(num_eigenstates))

    def forward(self, drive_BTE, pace_BTK):
        """Return the latest state that each token may read."""
        rows, tokens, parts = drive_BTE.shape
        rate_K = self.log_rate.float().exp()
        index_K = torch.arange(1, len(rate_K) + 1, device=rate_K.device, dtype=torch.float64)
        angle_K = (2 * math.pi * (index_K * GOLDEN).frac()).float()
        angle_K = angle_K + rate_K * self.detuning.float()
        log_decay = -rate_K if pace_BTK is None else -rate_K * pace_BTK
        gain = (-torch.expm1(2 * log_decay)).sqrt()
        drive_BTE = drive_BTE.float()
        if self.scale > 1:
            complete = tokens // self.scale * self.scale
            drive_BTE = drive_BTE[:, :complete].unflatten(1, (-1, self.scale)).mean(dim=2)
        drive_BTE = drive_BTE * torch.cat((gain, gain), dim=-1)
        drive_BTK = torch.complex(*drive_BTE.chunk(2, dim=-1))
        exponent = torch.complex(log_decay.double(), angle_K.double().expand_as(log_decay))
        states_BTK = recurrence(drive_BTK, exponent.expand(rows, drive_BTK.shape[1], -1))
        states_BTE = torch.cat((states_BTK.real, states_BTK.imag), dim=-1)
        if self.scale > 1:
            before_B1E = states_BTE.new_zeros(rows, 1, parts)
            known = torch.cat((before_B1E, states_BTE), dim=1)
            states_BTE = known.repeat_interleave(self.scale, dim=1)[:, 1 : tokens + 1]
        return states_BTE


def recurrence(drive_BTK, exponent_BTK):
    """Return s[t] = exp(exponent[t]) * s[t-1] + drive[t], starting from zero, in chunks."""
    rows, tokens, count = drive_BTK.shape
    state_BK = drive_BTK.new_zeros(rows, count)
    chunks = []
    for start in range(0, tokens, CHUNK):
        drive_BCK = drive_BTK[:, start : start + CHUNK]
        sums_BCK = exponent_BTK[:, start : start + CHUNK].cumsum(dim=1)
        powers = (sums_BCK[:, :, None] - sums_BCK[:, None]).exp().to(drive_BTK.dtype)
        size = drive_BCK.shape[1]
        past = torch.ones(size, size, dtype=torch.bool, device=drive_BTK.device).tril()
        powers = powers.masked_fill(~past[None, :, :, None], 0)
        inside_BCK = torch.einsum("bijk,bjk->bik", powers, drive_BCK)
        carried_BCK = sums_BCK.exp().to(drive_BTK.dtype) * state_BK[:, None]
        chunks.append(inside_BCK + carried_BCK)
        state_BK = chunks[-1][:, -1]
    return torch.cat(chunks, dim=1) if chunks else drive_BTK


class Recurrence(nn.Module):
    """Drive, eigenstates, coupling, and back to the model's width through a gate."""

    def __init__(self, model: SimpleNamespace) -> None:
        super().__init__()
        width, count, bias = model.d_model, model.num_eigenstates, model.bias
        self.drive = nn.Linear(width, 2 * count, bias=bias)
        self.gate = nn.Linear(width, width, bias=True)
        self.output = nn.Linear(2 * count, width, bias=bias)
        self.selection = (
            nn.Linear(width, count, bias=True) if model.eigenvalues == "selective" else None
        )
        self.memories = nn.ModuleList(Memory(count, scale) for scale in model.scales)
        self.share = nn.Parameter(torch.zeros(len(model.scales))) if len(model.scales) > 1 else None
        self.coupling = nn.Parameter(torch.zeros(count, count // model.num_heads))

    def forward(self, hidden_BTD):
        """Return the output for each token."""
        pace_BTK = None
        if self.selection is not None:
            pace_BTK = 2 * self.selection(hidden_BTD).float().sigmoid()
        drive_BTE = self.drive(hidden_BTD)
        states = [memory(drive_BTE, pace_BTK) for memory in self.memories]
        states_BTE = states[0]
        if self.share is not None:
            share = self.share.float().softmax(dim=0)[:, None, None, None]
            states_BTE = (torch.stack(states) * share).sum(dim=0)
        states_BTE = self._coupled(states_BTE).to(hidden_BTD.dtype)
        return self.gate(hidden_BTD).sigmoid() * self.output(states_BTE)

    def _coupled(self, states_BTE):
        """Return the states plus a little of the others of their head."""
        size = self.coupling.shape[1]
        coupling_HJI = self.coupling.float().view(-1, size, size)
        parts = states_BTE.unflatten(-1, (2, -1, size))
        added = torch.einsum("btghi,hji->btghj", parts, coupling_HJI)
        return states_BTE + RESONANCE * added.flatten(-3)


class MLP(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(self, model: SimpleNamespace) -> None:
        super().__init__()
        inner = model.d_ff or 4 * model.d_model
        self.up = nn.Linear(model.d_model, inner, bias=model.bias)
        self.down = nn.Linear(inner, model.d_model, bias=model.bias)

    def forward(self, hidden_BTD):
        """Return the output for each token."""
        return self.down(functional.silu(self.up(hidden_BTD)))


class Block(nn.Module):
    """A gated recurrence and an MLP, each added to the hidden states."""

    def __init__(self, model: SimpleNamespace) -> None:
        super().__init__()
        self.recurrence_norm = LayerNorm(model.d_model, model.bias)
        self.recurrence = Recurrence(model)
        self.mlp_norm = LayerNorm(model.d_model, model.bias)
        self.mlp = MLP(model)

    def forward(self, hidden_BTD):
        """Return the hidden states after this block."""
        hidden_BTD = hidden_BTD + self.recurrence(self.recurrence_norm(hidden_BTD))
        return hidden_BTD + self.mlp(self.mlp_norm(hidden_BTD))


class FlatoutForCausalLM(PreTrainedModel, GenerationMixin):
    """Embedding, blocks and output weight."""

    config_class = FlatoutConfig
    _no_split_modules = ("Block",)

    def __init__(self, config: FlatoutConfig) -> None:
        super().__init__(config)
        self.shape = model = SimpleNamespace(**config.model)
        self.token_embedding = nn.Embedding(model.vocab_size, model.d_model)
        self.position_embedding = (
            nn.Embedding(model.max_seq_len, model.d_model) if model.positions == "learned" else None
        )
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.final_norm = LayerNorm(model.d_model, model.bias)
        self.unembedding = (
            None if model.tied_head else nn.Linear(model.d_model, model.vocab_size, bias=False)
        )
        self.post_init()

    def get_input_embeddings(self):
        """Return the token embedding."""
        return self.token_embedding

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        """Return the whole text: no state is kept between tokens."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, **ignored):
        """Return the logits at every position, and with labels the mean loss of the next tokens.

        Padding is not supported: every row has as many tokens.
        """
        if attention_mask is not None and not attention_mask.bool().all():
            raise ValueError("This model takes no padding: pass rows of equal length.")
        model = self.shape
        hidden_BTD = self.token_embedding(input_ids)
        if self.position_embedding is not None:
            if input_ids.shape[1] > model.max_seq_len:
                raise ValueError(f"This model has {model.max_seq_len} positions.")
            hidden_BTD = hidden_BTD + self.position_embedding.weight[: input_ids.shape[1]]
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        output = self.token_embedding if self.unembedding is None else self.unembedding
        logits_BTV = functional.linear(self.final_norm(hidden_BTD), output.weight)
        if model.logit_softcap is not None:
            logits_BTV = model.logit_softcap * torch.tanh(logits_BTV / model.logit_softcap)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV)
