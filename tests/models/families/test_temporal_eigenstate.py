"""Checkpoints of temporal-eigenstate-networks compute the same function in flatout's model.

Letters: T tokens, D width, K eigenstates.
"""

import math

import pytest
import torch
from foreign_models import TOKENS, config_of, draw
from torch.nn import functional

from flatout.errors import ConfigError
from flatout.models.eigenstate import Eigenstate
from flatout.models.families.source import ForeignWeights, find_model
from flatout.models.families.temporal_eigenstate import recognise, tensors
from flatout.ops import Ops, scan

WIDTH, STATES, HEADS, POSITIONS = 24, 8, 2, 20
KINDS = ("weight", "bias")


def checkpoint():
    """Return the tensors of a model with two FFT layers, in fp64."""
    shapes = {"token_emb.weight": (61, WIDTH), "pos_emb.weight": (POSITIONS, WIDTH)}
    shapes |= {"norm_f.weight": (WIDTH,), "norm_f.bias": (WIDTH,)}
    for layer in ("layers.0", "layers.1"):
        shapes |= {
            f"{layer}.in_proj.weight": (2 * STATES, WIDTH),
            f"{layer}.out_proj.weight": (WIDTH, 2 * STATES),
            f"{layer}.gate_proj.weight": (WIDTH, WIDTH),
            f"{layer}.gate_proj.bias": (WIDTH,),
            f"{layer}.mlp.0.weight": (40, WIDTH),
            f"{layer}.mlp.0.bias": (40,),
            f"{layer}.mlp.2.weight": (WIDTH, 40),
            f"{layer}.mlp.2.bias": (WIDTH,),
        }
        shapes |= {f"{layer}.{norm}.{k}": (WIDTH,) for norm in ("norm1", "norm2") for k in KINDS}
        size = STATES // HEADS
        shapes |= {f"{layer}.coupling_blocks.{head}": (size, size) for head in range(HEADS)}
    weights = {
        name: draw(name, shape, around_one="norm" in name and "weight" in name).double()
        for name, shape in shapes.items()
    }
    for layer in ("layers.0", "layers.1"):
        weights[f"{layer}.log_decay"] = torch.linspace(-3, 4, STATES, dtype=torch.float64)
        weights[f"{layer}.frequency"] = torch.linspace(0, 5.5, STATES, dtype=torch.float64)
    return weights | {"lm_head.weight": weights["token_emb.weight"]}


def reference(weights, tokens):
    """Return the logits of one row of tokens, with the recurrence step by step."""

    def norm(x, name):
        return functional.layer_norm(
            x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"]
        )

    def linear(x, name):
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = weights["token_emb.weight"][tokens] + weights["pos_emb.weight"][: len(tokens)]
    for layer in ("layers.0", "layers.1"):
        normed = norm(x, f"{layer}.norm1")
        drive_TK = torch.complex(*linear(normed, f"{layer}.in_proj").chunk(2, dim=-1))
        magnitude, angle = weights[f"{layer}.log_decay"].sigmoid(), weights[f"{layer}.frequency"]
        factor_K = torch.polar(magnitude, angle)
        coupling_KK = torch.block_diag(
            *(weights[f"{layer}.coupling_blocks.{head}"] for head in range(HEADS))
        )
        state_K, coupled = torch.zeros_like(factor_K), []
        for drive_K in drive_TK:
            state_K = factor_K * state_K + drive_K
            coupled.append(torch.cat((coupling_KK @ state_K.real, coupling_KK @ state_K.imag)))
        read = linear(torch.stack(coupled), f"{layer}.out_proj")
        x = x + linear(normed, f"{layer}.gate_proj").sigmoid() * read
        inner = functional.silu(linear(norm(x, f"{layer}.norm2"), f"{layer}.mlp.0"))
        x = x + linear(inner, f"{layer}.mlp.2")
    return norm(x, "norm_f") @ weights["token_emb.weight"].T


@pytest.mark.parametrize("ops", [Ops.plain(), Ops.plain(scan=scan.chunked)])
def test_logits_agree_in_fp64(tmp_path, ops):
    weights = checkpoint()
    torch.save({"model_state_dict": weights, "step": 3}, tmp_path / "best_model.pt")
    found = find_model(str(tmp_path / "best_model.pt"))
    config = config_of(found.keys)
    assert (config.max_seq_len, config.num_eigenstates, config.num_heads) == (20, STATES, HEADS)
    model = Eigenstate(config, ops).double().eval()
    files = ForeignWeights(found, model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    files.require_fit(shapes)
    model.load_state_dict({name: files.read(name) for name in shapes})
    tokens = torch.tensor(TOKENS)
    expected = reference(weights, tokens[0])
    torch.testing.assert_close(model.logits(tokens)[0], expected, rtol=0, atol=1e-10)


def test_the_angles_stay_within_half_a_circle():
    weights = checkpoint()
    found = recognise({name: tuple(tensor.shape) for name, tensor in weights.items()}, {})
    maps = {one.name: one for one in tensors(config_of(found))}
    one = maps["blocks.0.recurrence.eigenvalues.detuning"]
    detuning = one.join([weights[name] for name in one.foreign])
    rate = functional.softplus(-weights["layers.0.log_decay"])
    assert (detuning * rate).abs().max() <= math.pi


def test_selective_layers_are_rejected():
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint().items()}
    with pytest.raises(ConfigError, match="selective eigenvalues"):
        recognise(shapes | {"layers.0.select_proj.weight": (16, 24)}, {})
    del shapes["pos_emb.weight"]
    assert recognise(shapes, {}) is None
