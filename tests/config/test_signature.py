"""What Python passes to a command is held to what its signature declares."""

import subprocess
import sys

import pytest

import flatout
from flatout.errors import ConfigError


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: flatout.export(to="foo"), "to='foo' must be 'huggingface' or 'safetensors'."),
        (
            lambda: flatout.export(dtype="int3"),
            "dtype='int3' must be 'float32', 'bfloat16', 'float16' or None.",
        ),
        (lambda: flatout.export(shard_mib=0), "shard_mib=0 must be a whole number from 1."),
        (lambda: flatout.export(to=["safetensors"]), "to=['safetensors'] must be 'huggingface'"),
        (lambda: flatout.export(out=""), "out='' must be a path (not an empty one), text or None."),
        (lambda: flatout.profile("demo", steps=-1), "steps=-1 must be a whole number from 1."),
        (lambda: flatout.profile("demo", steps=True), "steps=True must be a whole number"),
        (lambda: flatout.evaluate(max_tokens=-1), "max_tokens=-1 must be a whole number from 1"),
        (
            lambda: flatout.plan("demo", price_per_hour=-1),
            "price_per_hour=-1 must be a finite number from 0 or None.",
        ),
        (
            lambda: flatout.tune("demo", minutes=float("nan")),
            "minutes=nan must be a finite number from 1.",
        ),
        (lambda: flatout.tune("demo", minutes=10**400), "minutes=1000"),
        (
            lambda: flatout.sample(temperature="hot"),
            "temperature='hot' must be a finite number from 0.",
        ),
        (lambda: flatout.sample(stop="END"), "stop='END' must be a list of text or None."),
        (lambda: flatout.verify(None), "path=None must be text or a path (not an empty one)."),
        (lambda: flatout.train("c.yaml", {"train.steps": 3}), "overrides={'train.steps': 3} must"),
        (lambda: flatout.train("demo", ["a=1", 2]), "overrides=['a=1', 2] must be a list of text"),
        (
            lambda: flatout.train({"model": {}}),
            "recipe={'model': {}} must be text, a path (not an empty one) or a RunConfig.",
        ),
        (lambda: flatout.runs(3), "run=3 must be text, a path (not an empty one) or None."),
        (lambda: flatout.demo(minutes=0), "minutes=0 must be a finite number from 0.001 or None."),
        (lambda: flatout.prepare("a", "b", on_bad_row="skp"), "on_bad_row='skp' must be 'raise'"),
        (lambda: flatout.prepare("a", "b", max_documents=0), "max_documents=0 must be a whole"),
        (lambda: flatout.prepare("a", "b", max_bytes=-1), "max_bytes=-1 must be a whole number"),
        (lambda: flatout.prepare("a", "b", max_bad_rows=-1), "max_bad_rows=-1 must be a whole"),
        (lambda: flatout.prepare("a", "b", workers=0), "workers=0 must be a whole number from 1"),
    ],
)
def test_values_that_a_parameter_does_not_take_are_rejected_by_name(call, what):
    with pytest.raises(ConfigError) as refused:
        call()
    assert refused.value.what.startswith(what)
    assert refused.value.fix.startswith(f"Correct {what.partition('=')[0]}: ")


def test_numbers_of_numpy_paths_and_tuples_are_taken(tmp_path):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(flatout.FlatoutError, match="no run directory"):
        flatout.sample(tmp_path / "none", top_k=numpy.int64(3), stop=("a",), temperature=1)


def test_values_are_rejected_before_torch_is_loaded():
    program = (
        "import sys, flatout\ntry:\n    flatout.tune('demo', minutes=-1)\n"
        "except flatout.FlatoutError:\n    print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
