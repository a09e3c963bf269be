"""Weights are read one at a time, whole and in the type of the export."""

import pytest
import torch

from flatout.errors import CheckpointError
from flatout.inference.export.source import open_source
from flatout.training.checkpoint.merged import MergedWeights, read_merged

pytestmark = pytest.mark.slow


def test_every_weight_equals_that_of_the_checkpoint(make_run):
    run = make_run()
    source = open_source(run)
    stored = read_merged(run / "checkpoints" / "step-0")
    assert source.weights.shapes.keys() == stored.keys()
    for name, weight in stored.items():
        assert torch.equal(source.weights.read(name), weight)
    assert source.num_parameters == sum(weight.numel() for weight in stored.values())
    assert source.step == 0


def test_weights_are_converted(make_run):
    source = open_source(make_run(), dtype="bfloat16")
    name = "token_embedding.weight"
    weight = source.weights.read(name)
    assert source.dtype_of(name) == torch.bfloat16
    assert torch.equal(source.converted(name, weight), weight.to(torch.bfloat16))


def test_numbers_beyond_float16_are_an_error(make_run):
    source = open_source(make_run(), dtype="float16")
    name = "token_embedding.weight"
    with pytest.raises(
        CheckpointError, match=r"token_embedding\.weight contains numbers that float16"
    ):
        source.converted(name, torch.tensor([1e6]))
    assert source.converted(name, torch.tensor([float("inf")])).isinf()


def test_weights_that_do_not_fit_the_config_are_named(make_run, monkeypatch):
    run, shapes = make_run(), MergedWeights.shapes.fget
    without = property(
        lambda self: {n: s for n, s in shapes(self).items() if "final_norm" not in n}
    )
    monkeypatch.setattr(MergedWeights, "shapes", without)
    with pytest.raises(CheckpointError, match=r"do not fit the model in .*: final_norm\.weight"):
        open_source(run)
