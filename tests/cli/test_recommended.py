import json
from dataclasses import replace

import pytest

from flatout.cli.recommended import MAX_EPOCHS, recommend
from flatout.config.schema import load_config
from flatout.hardware.machine import Gpu, Machine

CPU = Machine("a processor", 2, 8.0, (), "3.12")
H100 = replace(CPU, gpus=(Gpu("NVIDIA H100 80GB HBM3", 80.0, (9, 0), "570"),))
UNKNOWN = replace(CPU, gpus=(Gpu("a GPU of tomorrow", 80.0, (12, 0), "570"),))


@pytest.mark.parametrize(
    ("machine", "tokens", "vocab_size", "recipe"),
    [
        (CPU, 100_000, 65, "demo-char"),
        (CPU, 10_000_000, 4096, "demo"),
        (CPU, 10**10, 50_257, "demo"),
        (H100, 1_000_000, 4096, "demo-gpu"),
        (H100, 10**10, 65, "demo-gpu"),
        (H100, 10**10, 128_256, "demo-gpu"),
        (H100, 170_000_000, 50_257, "gpt2-124m"),
        (H100, 10**10, 50_257, "gpt2-350m"),
    ],
)
def test_the_largest_recipe_with_enough_text_is_recommended(
    tmp_path, machine, tokens, vocab_size, recipe
):
    found = recommend("data/my text", tokens, vocab_size, machine, tmp_path)
    steps = int(found.command.rpartition("=")[2])
    assert found.command == f"flatout train {recipe} data.path='data/my text' train.steps={steps}"
    config = load_config(recipe, ["data.path=x", f"train.steps={steps}"])
    assert found.epochs == round(steps * config.batch.tokens_per_step / tokens, 1)
    assert found.epochs <= MAX_EPOCHS + 0.5
    assert (
        steps * config.batch.tokens_per_step <= 20 * found.parameters + config.batch.tokens_per_step
    )


@pytest.mark.parametrize("machine", [CPU, H100])
def test_conversations_have_their_own_recipe(tmp_path, machine):
    found = recommend("data/capitals", 100_000, 1000, machine, tmp_path, is_chat=True)
    assert found.command.startswith("flatout train chat-demo data.path=data/capitals ")


def test_too_little_text_has_no_recommendation(tmp_path):
    assert recommend("data", 500, 65, CPU, tmp_path) is None


def test_parameters_approximate_those_of_the_model(tmp_path):
    from flatout.config.registry import MODELS

    for recipe, tokens, vocab_size in (
        ("gpt2-124m", 170_000_000, 50_257),
        ("gpt2-350m", 10**10, 50_257),
    ):
        config = load_config(recipe)
        made = MODELS.get("transformer")
        exact = made.num_parameters(
            made.check(config.model.own() | {"vocab_size": 50_304}, seq_len=config.data.seq_len)
        )
        assert recommend("data", tokens, vocab_size, H100, tmp_path).parameters == pytest.approx(
            exact, rel=0.02
        )


def test_time_is_measured_or_estimated_or_unknown(tmp_path):
    assert recommend("data", 1_000_000, 65, CPU, tmp_path).time.startswith("unknown before a run")
    assert recommend("data", 1_000_000, 65, UNKNOWN, tmp_path).time.startswith(
        "unknown before a run"
    )
    assert "at 30% of the peak of h100" in recommend("data", 10**10, 50_257, H100, tmp_path).time
    own = load_config("demo-char").model.own() | {"kind": "transformer"}
    for number, (vocab_size, rate) in enumerate([(65, 1000.0), (66, 9.0), (65, None)]):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        (run / "config.yaml").write_text(json.dumps({"model": own | {"vocab_size": vocab_size}}))
        (run / "summary.json").write_text(json.dumps({"tokens_per_s": rate}))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "summary.json").write_text("{")
    found = recommend("data", 1_000_000, 65, CPU, tmp_path)
    seconds = int(found.command.rpartition("=")[2]) * 2048 / 1000
    assert (
        found.time == f"about {int(seconds // 3600)} h {int(round(seconds) % 3600 // 60):02d} min, "
        f"at the 1,000 tokens/s of {tmp_path}/run-0"
    )
