"""A transformer that flatout trained, as a model of transformers. Needs torch, not flatout.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Letters: B rows, T tokens, S cached tokens and these, D width, H query heads, G key and value heads,
         C head size, F width inside the MLP.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class FlatoutConfig(PretrainedConfig):
    """The configuration: `model` has flatout's own keys, which its documentation explains."""

    model_type = "flatout"

    def __init__(self, model: dict | None = None, **others) -> None:
        self.model = model or {}
        super().__init__(**others)


class LayerNorm(nn.Module):
    """Layer normalisation with an optional bias."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, hidden):
        """Return the normalised hidden states."""
        bias = None if self.bias is None else self.bias.float()
        shape = self.weight.shape
        normed = functional.layer_norm(hidden.float(), shape, self.weight.float(), bias, self.eps)
        return normed.to(hidden.dtype)


class RMSNorm(nn.Module):
    """RMS normalisation."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden):
        """Return the normalised hidden states."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(hidden.dtype)


def new_norm(model: SimpleNamespace) -> nn.Module:
    """Return a norm of the hidden states."""
    if model.norm == "layernorm":
        return LayerNorm(model.d_model, model.layer_norm_eps, model.bias)
    return RMSNorm(model.d_model, model.rms_norm_eps)


def rotary_tables(model: SimpleNamespace, start: int, end: int, device):
    """Return cosines and sines for the positions from `start` to before `end`, (T, C).

    Component i of a head is paired with i + C/2; the sines of the first half are negated. If only
    some components rotate, they are the first of each half.
    """
    size = model.head_dim or model.d_model // model.num_heads
    rotated = model.rotary_dims or size
    exponent = torch.arange(0, rotated, 2, device=device, dtype=torch.float64) / rotated
    frequency = model.rotary_base**-exponent
    if model.rotary_scaling == "linear":
        frequency = frequency / model.rotary_factor
    elif model.rotary_scaling == "llama3":
        low, high = model.rotary_low_factor, model.rotary_high_factor
        periods = model.rotary_original_len * frequency / (2 * math.pi)
        unchanged = ((periods - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (unchanged + (1 - unchanged) / model.rotary_factor)
    frequency = functional.pad(frequency, (0, (size - rotated) // 2))
    angle = torch.arange(start, end, device=device, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1).float(), torch.cat((-sin, sin), dim=-1).float()


class Attention(nn.Module):
    """Attention; queries, keys and values are one product."""

    def __init__(self, model: SimpleNamespace, layer: int) -> None:
        super().__init__()
        self.layer = layer
        sees_all = model.full_attention_every and (layer + 1) % model.full_attention_every == 0
        self.window = None if sees_all else model.window
        self.softcap = model.attention_softcap
        self.size = model.head_dim or model.d_model // model.num_heads
        self.heads, self.groups = model.num_heads, model.num_kv_heads or model.num_heads
        qkv_bias = model.bias if model.qkv_bias is None else model.qkv_bias
        rows = (self.heads + 2 * self.groups) * self.size
        self.qkv = nn.Linear(model.d_model, rows, bias=qkv_bias)
        self.output = nn.Linear(self.heads * self.size, model.d_model, bias=model.bias)
        self.query_norm = RMSNorm(self.size, model.rms_norm_eps) if model.qk_norm else None
        self.key_norm = RMSNorm(self.size, model.rms_norm_eps) if model.qk_norm else None
        self.post_norm = new_norm(model) if model.post_norm else None

    def forward(self, hidden_BTD, tables, cache):
        """Return the output for each token; keys and values are added to the cache, if any."""
        rows, tokens = hidden_BTD.shape[:2]
        heads = self.qkv(hidden_BTD).view(rows, tokens, -1, self.size).transpose(1, 2)
        q_BHTC, k_BGTC, v_BGTC = heads.split([self.heads, self.groups, self.groups], dim=1)
        if self.query_norm is not None:
            q_BHTC, k_BGTC = self.query_norm(q_BHTC), self.key_norm(k_BGTC)
        if tables is not None:
            q_BHTC, k_BGTC = rotated(q_BHTC, tables), rotated(k_BGTC, tables)
        if cache is not None:
            k_BGTC, v_BGTC = cache.update(k_BGTC, v_BGTC, self.layer)
        k_BHSC, v_BHSC = (
            part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k_BGTC, v_BGTC)
        )
        mask_TS = visible(tokens, k_BHSC.shape[2], self.window, hidden_BTD.device)
        if self.softcap is None:
            mixed_BHTC = functional.scaled_dot_product_attention(
                q_BHTC, k_BHSC, v_BHSC, attn_mask=mask_TS
            )
        else:
            scores_BHTS = (q_BHTC @ k_BHSC.transpose(-2, -1)).float() / math.sqrt(self.size)
            scores_BHTS = torch.tanh(scores_BHTS / self.softcap) * self.softcap
            weights_BHTS = scores_BHTS.masked_fill(~mask_TS, float("-inf")).softmax(dim=-1)
            mixed_BHTC = weights_BHTS.to(v_BHSC.dtype) @ v_BHSC
        out_BTD = self.output(mixed_BHTC.transpose(1, 2).flatten(2))
        return out_BTD if self.post_norm is None else self.post_norm(out_BTD)


def rotated(heads_BHTC, tables):
    """Return heads rotated by their positions."""
    cos_TC, sin_TC = tables
    wide_BHTC = heads_BHTC.float()
    swapped_BHTC = wide_BHTC.roll(wide_BHTC.shape[-1] // 2, dims=-1)
    return (wide_BHTC * cos_TC + swapped_BHTC * sin_TC).to(heads_BHTC.dtype)


def visible(tokens: int, total: int, window: int | None, device):
    """Return which of `total` keys each of the last `tokens` queries sees."""
    query_T1 = torch.arange(total - tokens, total, device=device)[:, None]
    key_S = torch.arange(total, device=device)
    seen_TS = key_S <= query_T1
    return seen_TS if window is None else seen_TS & (key_S > query_T1 - window)


def gelu(hidden):
    """Return GELU by the tanh formula."""
    return functional.gelu(hidden, approximate="tanh")


GATES = {"swiglu": functional.silu, "geglu": gelu}
"""Activations of a gate, which is the first half of the first product."""
PLAIN = {
    "gelu": gelu,
    "gelu_exact": functional.gelu,
    "relu2": lambda hidden: functional.relu(hidden).square(),
}
"""Activations without a gate."""


class MLP(nn.Module):
    """Two linear layers with an activation, or an activated gate, between them."""

    def __init__(self, model: SimpleNamespace) -> None:
        super().__init__()
        self.activation = model.activation
        width, inner, bias = model.d_model, model.d_ff, model.bias
        if self.activation in GATES:
            self.gate_up = nn.Linear(width, 2 * inner, bias=bias)
        else:
            self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.post_norm = new_norm(model) if model.post_norm else None

    def forward(self, hidden_BTD):
        """Return the output for each token."""
        if self.activation in GATES:
            gate_BTF, up_BTF = self.gate_up(hidden_BTD).chunk(2, dim=-1)
            inner_BTF = GATES[self.activation](gate_BTF) * up_BTF
        else:
            inner_BTF = PLAIN[self.activation](self.up(hidden_BTD))
        out_BTD = self.down(inner_BTF)
        return out_BTD if self.post_norm is None else self.post_norm(out_BTD)


class Block(nn.Module):
    """Attention and an MLP, each added to the hidden states."""

    def __init__(self, model: SimpleNamespace, layer: int) -> None:
        super().__init__()
        self.is_parallel = model.parallel_residual
        self.attention_norm = new_norm(model)
        self.attention = Attention(model, layer)
        self.mlp_norm = new_norm(model)
        self.mlp = MLP(model)

    def forward(self, hidden_BTD, tables, cache):
        """Return the hidden states after this block."""
        sum_BTD = hidden_BTD + self.attention(self.attention_norm(hidden_BTD), tables, cache)
        read_BTD = hidden_BTD if self.is_parallel else sum_BTD
        return sum_BTD + self.mlp(self.mlp_norm(read_BTD))


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
        self.blocks = nn.ModuleList(Block(model, layer) for layer in range(model.num_layers))
        self.final_norm = new_norm(model)
        self.unembedding = (
            None if model.tied_head else nn.Linear(model.d_model, model.vocab_size, bias=False)
        )
        self.post_init()

    def get_input_embeddings(self):
        """Return the token embedding."""
        return self.token_embedding

    def forward(self, input_ids, attention_mask=None, past_key_values=None, labels=None, **ignored):
        """Return the logits at every position, and with labels the mean loss of the next tokens.

        Padding is not supported: every row has as many tokens.
        """
        if attention_mask is not None and not attention_mask.bool().all():
            raise ValueError("This model takes no padding: pass rows of equal length.")
        model, tokens = self.shape, input_ids.shape[1]
        start = 0 if past_key_values is None else past_key_values.get_seq_length()
        if start + tokens > model.max_seq_len:
            raise ValueError(f"This model has {model.max_seq_len} positions.")
        hidden_BTD = self.token_embedding(input_ids) * model.embedding_scale
        if self.position_embedding is not None:
            hidden_BTD = hidden_BTD + self.position_embedding.weight[start : start + tokens]
        tables = (
            rotary_tables(model, start, start + tokens, input_ids.device)
            if model.positions == "rotary"
            else None
        )
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, tables, past_key_values)
        output = self.token_embedding if self.unembedding is None else self.unembedding
        hidden_BTD = self.final_norm(hidden_BTD) * model.logit_scale
        logits_BTV = functional.linear(hidden_BTD, output.weight)
        if model.logit_softcap is not None:
            logits_BTV = model.logit_softcap * torch.tanh(logits_BTV / model.logit_softcap)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=past_key_values)
