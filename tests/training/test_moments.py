"""`train.init_from` takes AdamW's moments that another tool saved beside its weights."""

import pytest
import torch
from foreign_models import DOCUMENTS, draw, foreign_weights, write_model

from flatout.config.schema import load_config
from flatout.errors import Stopped
from flatout.training.init_from import load_initial
from flatout.training.run import run_training
from flatout.training.step import train_step

GPT2_BLOCK = "ln_1 attn.c_attn attn.c_proj ln_2 mlp.c_fc mlp.c_proj"
LLAMA_BLOCK = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj "
    "mlp.down_proj input_layernorm post_attention_layernorm"
)
NUM_IDS = 257


def in_gpt2s_order():
    blocks = [f"h.{layer}.{name}" for layer in range(2) for name in GPT2_BLOCK.split()]
    names = [f"{name}.{part}" for name in [*blocks, "ln_f"] for part in ("weight", "bias")]
    return [f"transformer.{name}" for name in ("wte.weight", "wpe.weight", *names)]


def in_llamas_order():
    blocks = [f"layers.{layer}.{name}" for layer in range(2) for name in LLAMA_BLOCK.split()]
    names = [f"model.{name}.weight" for name in ("embed_tokens", *blocks, "norm")]
    return [*names, "lm_head.weight"]


def optimizer_of(weights, order, groups=2, make=torch.optim.AdamW):
    """Return the state of an optimizer after a step whose gradients are the weights."""
    parameters = [torch.nn.Parameter(weights[name].clone()) for name in order]
    kinds = [[p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]]
    optimizer = make([{"params": each} for each in (kinds if groups == 2 else [parameters])])
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer.state_dict()


@pytest.fixture
def started(build_run, tiny, tiny_set, messages):
    """Return a run that starts from a model, and what it said."""

    def start(path, **changes):
        values = {key: value for key, value in tiny.items() if not key.startswith("model.")}
        values |= {"data.path": str(tiny_set), "train.init_from": str(path)}
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        run = build_run(load_config().with_values(values))
        load_initial(run, None, progress=messages)
        return run, " ".join(messages.lines)

    return start


def require_moments(run):
    """Check that each parameter has the moments of a step whose gradient was its value."""
    (optimizer,) = run.optimizers
    assert len(optimizer.state) == len([*run.core.parameters()])
    for parameter in run.core.parameters():
        state = optimizer.state[parameter]
        torch.testing.assert_close(state["exp_avg"], 0.1 * parameter.detach())
        torch.testing.assert_close(state["exp_avg_sq"], 0.001 * parameter.detach().square())
        assert state["exp_avg"].stride() == parameter.stride(), "kernels go through memory in order"
        assert state["step"] == 1
    train_step(run, next(run.loader))
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def nanogpts(tmp_path, **options):
    """Write a checkpoint of nanoGPT's train.py, with the optimizer in it."""
    shapes = {"wte.weight": (NUM_IDS, 32), "wpe.weight": (24, 32)}
    sizes = {"ln": (32,), "attn.c_attn": (96, 32), "attn.c_proj": (32, 32)}
    sizes |= {"mlp.c_fc": (128, 32), "mlp.c_proj": (32, 128)}
    order, weights = in_gpt2s_order(), {}
    for name in order:
        layer = name.removeprefix("transformer.").rpartition(".")[0]
        known = next((s for part, s in sizes.items() if part in layer), None)
        shape = known or shapes[name.removeprefix("transformer.")]
        shape = shape[:1] if name.endswith("bias") else shape
        weights[name] = draw(name, shape, around_one=False)
    arguments = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "bias": True}
    path = tmp_path / "ckpt.pt"
    torch.save(
        {
            "model": weights | {"lm_head.weight": weights["transformer.wte.weight"]},
            "optimizer": optimizer_of(weights, order, **options),
            "model_args": arguments | {"vocab_size": NUM_IDS, "dropout": 0.0},
            "iter_num": 1,
        },
        path,
    )
    return path


@pytest.mark.parametrize("count", [1, 2])
def test_the_moments_of_the_only_optimizer_of_lightning_continue(tmp_path, started, count):
    path = nanogpts(tmp_path)
    document = torch.load(path, weights_only=True)
    torch.save(document | {"optimizer_states": [document.pop("optimizer")] * count}, path)
    run, said = started(path)
    if count == 1:
        require_moments(run)
    else:
        assert f"those of {path} are of 2 optimizers" in said


@pytest.mark.parametrize("groups", [1, 2])
def test_the_moments_of_a_checkpoint_of_nanogpt_continue(tmp_path, started, groups):
    run, said = started(nanogpts(tmp_path, groups=groups))
    assert f"AdamW continues after 1 step with the moments of {tmp_path / 'ckpt.pt'}." in said
    require_moments(run)


def test_a_run_with_such_moments_resumes_bit_for_bit(tmp_path, tiny, tiny_set, stop_at):
    values = {key: value for key, value in tiny.items() if not key.startswith("model.")}
    values |= {"data.path": str(tiny_set), "train.init_from": str(nanogpts(tmp_path))}
    config = load_config().with_values(values | {"train.eval_every": 0})
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(2)])
    (tmp_path / "ckpt.pt").unlink()
    resumed = run_training(config, tmp_path / "run")
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize(
    ("kind", "order"), [("gpt2", in_gpt2s_order), ("llama 2", in_llamas_order)]
)
def test_the_moments_of_a_directory_of_the_trainer_continue(tmp_path, started, kind, order):
    """Matrices are transposed or stacked on the way, and so are their moments."""
    document = DOCUMENTS[kind] | {"vocab_size": NUM_IDS}
    weights = foreign_weights(document)
    write_model(tmp_path, document, weights)
    torch.save(optimizer_of(weights, order()), tmp_path / "optimizer.pt")
    run, said = started(tmp_path)
    assert "AdamW continues" in said
    require_moments(run)


def write_gpt2(folder, optimizer=None):
    document = DOCUMENTS["gpt2"] | {"vocab_size": NUM_IDS}
    weights = foreign_weights(document)
    write_model(folder, document, weights)
    if optimizer is not None:
        torch.save(optimizer(weights, in_gpt2s_order()), folder / "optimizer.bin")
    return folder


def of_sgd(weights, order):
    return optimizer_of(weights, order, make=lambda groups: torch.optim.SGD(groups, 0.1, 0.9))


class Code:
    def __reduce__(self):
        return print, ("run",)


def with_moment(model, key, value):
    """Return the state of a model's optimizer with another value."""
    state = optimizer_of(*model)
    if isinstance(value, str):
        state["state"][0][key] = value
    else:
        state["state"][0][key].view(-1)[0] = value
    return state


UNKNOWN, BAD = (
    "are not AdamW's of these parameters in a known order.",
    "are not finite, or negative",
)
OTHERS = {
    "another optimizer": (of_sgd, UNKNOWN),
    "one parameter less": (lambda weights, order: optimizer_of(weights, order[:-1]), UNKNOWN),
    "another order": (lambda weights, order: optimizer_of(weights, order[::-1]), UNKNOWN),
    "a value that is not finite": (lambda *one: with_moment(one, "exp_avg", float("nan")), BAD),
    "a negative square": (lambda *one: with_moment(one, "exp_avg_sq", -1.0), BAD),
    "a negative step": (lambda *one: with_moment(one, "step", -3.0), BAD),
    "an infinite step": (lambda *one: with_moment(one, "step", float("inf")), BAD),
    "a step that is no number": (lambda *one: with_moment(one, "step", "two"), UNKNOWN),
    "a list": (lambda *_: [1, 2, 3], "are of 3 optimizers"),
    "a list of another thing": (lambda *_: [3], UNKNOWN),
    "an empty state": (lambda *_: {}, UNKNOWN),
    "code": (
        lambda *_: {"state": Code()},
        "cannot be read: {0}/optimizer.bin contains Python code or objects in a pickle, or is "
        "damaged. Reading them would execute code.",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_states_are_reported_and_moments_start_at_zero(tmp_path, started, capsys, what):
    optimizer, why = OTHERS[what]
    run, said = started(write_gpt2(tmp_path, optimizer))
    reason = why.format(tmp_path)
    assert f"The optimizer's moments start at zero: those of {tmp_path} {reason}" in said
    assert said.endswith(".")
    assert not said.endswith("..")
    assert "run" not in capsys.readouterr().out.split()
    assert not run.optimizers[0].state


def test_biases_that_transformers_has_before_the_norms_are_not_confused_with_them(
    tmp_path, started
):
    """All vectors of such a model have one size, so no shape shows the other order."""
    document = DOCUMENTS["qwen2"] | {"vocab_size": NUM_IDS, "num_key_value_heads": 4}
    weights = foreign_weights(document)
    write_model(tmp_path, document, weights)
    order = [name for name in in_llamas_order() if name in weights]
    for name in [name for name in weights if name.endswith("_proj.bias")]:
        order.insert(order.index(name.replace("bias", "weight")) + 1, name)
    assert {*order} == {*weights}
    torch.save(optimizer_of(weights, order), tmp_path / "optimizer.pt")
    _, said = started(tmp_path)
    assert "start at zero" in said


def test_an_optimizer_without_such_moments_is_reported(tmp_path, started):
    _, said = started(write_gpt2(tmp_path, optimizer_of), optim__kind="muon")
    assert "are AdamW's in fp32, and this run's optimizer keeps others" in said


def test_adapters_do_not_take_the_moments_of_whole_weights(tmp_path, started):
    run, said = started(write_gpt2(tmp_path, optimizer_of), lora__rank=2)
    assert "start at zero: those of" in said
    assert said.endswith("are of whole weights, and this run trains adapters.")
    assert not run.optimizers[0].state


@pytest.mark.parametrize("named", [False, True])
def test_a_model_without_an_optimizer_says_nothing_of_it(tmp_path, started, named):
    path = write_gpt2(tmp_path)
    if named:
        path = nanogpts(tmp_path)
        torch.save(torch.load(path) | {"optimizer": None, "optim": "adamw"}, path)
    run, said = started(path)
    assert "moments" not in said
    assert not run.optimizers[0].state


def test_the_final_model_of_the_trainer_is_reported_to_have_no_moments(tmp_path, started):
    path = write_gpt2(tmp_path)
    (path / "training_args.bin").write_bytes(b"")
    _, said = started(path)
    assert (
        f"The optimizer's moments start at zero: those of {path} are in its checkpoints, not "
        "beside the final model."
    ) in said


@pytest.mark.parametrize("state", [{}, [7, 7], 7])
def test_anything_in_the_place_of_the_optimizer_in_a_file_is_reported(tmp_path, started, state):
    path = nanogpts(tmp_path)
    torch.save(torch.load(path) | {"optimizer": state}, path)
    _, said = started(path)
    assert "The optimizer's moments start at zero" in said


@pytest.mark.parametrize("beside", [True, "optimizer_state_dict", "optim"])
def test_the_moments_of_a_module_of_ones_own_continue(tmp_path, monkeypatch, started, beside):
    """accelerate saves model.safetensors and optimizer.bin, other loops one file."""
    (tmp_path / "own_moments.py").write_text(
        "import torch\nfrom flatout.models.adapter import adapt\n"
        "class Module(torch.nn.Module):\n"
        "    def __init__(self, vocab_size):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(vocab_size, 8)\n"
        "        self.inner = torch.nn.Linear(8, 8)\n"
        "        self.other = torch.nn.Linear(8, 8)\n"
        "        self.head = torch.nn.Linear(8, vocab_size, bias=False)\n"
        "    def forward(self, tokens):\n"
        "        return self.head(self.other(self.inner(self.table(tokens))))\n"
        "def build(vocab_size: int):\n"
        "    return Module(vocab_size)\n"
        "MODEL = adapt(build)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shapes = {"table.weight": (NUM_IDS, 8), "inner.weight": (8, 8), "inner.bias": (8,)}
    shapes |= {"other.weight": (8, 8), "other.bias": (8,), "head.weight": (NUM_IDS, 8)}
    weights = {name: draw(name, shape, around_one=False) for name, shape in shapes.items()}
    optimizer = optimizer_of(weights, [*shapes], groups=1)
    folder = tmp_path / "theirs"
    folder.mkdir()
    if beside is True:
        torch.save(weights, folder / "pytorch_model.bin")
        torch.save(optimizer, folder / "optimizer.bin")
    else:
        whole = {"model_state_dict": weights, beside: optimizer, "epoch": 3}
        torch.save(whole, folder / "last.pt")
    path = folder if beside is True else folder / "last.pt"
    run, said = started(path, model__kind="own_moments:MODEL")
    assert "AdamW continues" in said
    require_moments(run)
