"""The validation loss is the plain mean over all targets, whatever the batches, and leaves the run as it was."""

from __future__ import annotations

import pytest
import torch

from flatout.training.evaluation import evaluate


def plain_loss(run, num_tokens=None):
    """Score the split window by window, the last and shorter one too, with nothing of the feed."""
    tokens = torch.from_numpy(run.dataset.split("val").read_tokens(0, run.dataset.split("val").num_tokens).astype("int64"))
    length, total, count = run.config.data.seq_len, 0.0, 0
    run.core.eval()
    for start in range(0, min(len(tokens) - 1, num_tokens or len(tokens)), length):
        piece = tokens[start : start + length + 1]
        with torch.no_grad():
            loss, valid = run.core(piece[None, :-1], piece[None, 1:])
        total, count = total + float(loss), count + int(valid)
    run.core.train()
    return total / count, count


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_every_target_counts_once_for_any_number_of_rows(build_run, tiny_config, rows):
    run = build_run(tiny_config(batch__rows_per_device=rows, model__dropout=0.5))
    expected, count = plain_loss(run)
    found = evaluate(run)
    assert found.loss == pytest.approx(expected, rel=1e-6)
    assert found.tokens == count == run.dataset.split("val").num_tokens - 1
    assert found.bits_per_byte is not None


def test_a_part_of_the_split_is_its_beginning(build_run, tiny_config):
    run = build_run(tiny_config())
    found = evaluate(run, max_tokens=48)
    expected, count = plain_loss(run, num_tokens=48)
    assert (found.loss, found.tokens) == (pytest.approx(expected, rel=1e-6), count)
    assert found.bits_per_byte is None


def test_evaluation_leaves_mode_generators_and_feed_alone(build_run, tiny_config):
    run = build_run(tiny_config(model__dropout=0.5))
    state, position = torch.get_rng_state(), run.feed.position
    evaluate(run)
    assert run.core.training
    assert torch.equal(torch.get_rng_state(), state)
    assert run.feed.position == position


def test_perplexity_is_the_exponential(build_run, tiny_config):
    found = evaluate(build_run(tiny_config()))
    assert found.perplexity == pytest.approx(torch.tensor(found.loss).exp().item(), rel=1e-6)
