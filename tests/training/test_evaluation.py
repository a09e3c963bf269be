"""The validation loss is the mean over all targets for any batch size; runs are unaffected."""

import math
from types import SimpleNamespace

import pytest
import torch

from flatout.data.store.mix import members_of, open_data
from flatout.training.evaluation import Evaluation, SplitScore, score, warn_of_unscored


def plain_loss(run, num_tokens=None):
    """Score the split one sequence at a time, without the data loader."""
    split = run.dataset.split("val")
    tokens = torch.from_numpy(split.read_tokens(0, split.num_tokens).astype("int64"))
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
    found = score(run)
    assert found.loss == pytest.approx(expected, rel=1e-6)
    assert found.tokens == count == run.dataset.split("val").num_tokens - 1
    assert found.bits_per_byte is not None


def test_max_tokens_scores_the_start_of_the_split(build_run, tiny_config):
    run = build_run(tiny_config())
    found = score(run, max_tokens=48)
    expected, count = plain_loss(run, num_tokens=48)
    assert (found.loss, found.tokens) == (pytest.approx(expected, rel=1e-6), count)
    assert found.bits_per_byte is None


def test_scoring_leaves_mode_generators_and_loader_unchanged(build_run, tiny_config):
    run = build_run(tiny_config(model__dropout=0.5))
    state, position = torch.get_rng_state(), run.loader.position
    score(run)
    assert run.core.training
    assert torch.equal(torch.get_rng_state(), state)
    assert run.loader.position == position


@pytest.fixture
def mixed_run(build_run, tiny_config, tiny_set, ragged_set):
    """Return a run whose mix takes 3/4 of `tiny` and 1/4 of `ragged`, which has a loss mask."""
    return build_run(tiny_config(data__path=None, data__mix={str(tiny_set): 3, str(ragged_set): 1}))


def test_each_dataset_of_a_mix_is_scored_separately_and_weighted_by_its_share(
    build_run, tiny_config, mixed_run
):
    found = score(mixed_run)
    for split, part in zip(found.by_dataset, members_of(mixed_run.dataset), strict=True):
        (alone,) = score(build_run(tiny_config(data__path=str(part.dataset.path)))).by_dataset
        assert (split.name, split.share) == (part.name, part.share)
        assert (split.loss, split.tokens, split.bits_per_byte) == (
            alone.loss,
            alone.tokens,
            alone.bits_per_byte,
        )
    first, second = found.by_dataset
    assert first.loss != second.loss
    assert found.loss == pytest.approx(0.75 * first.loss + 0.25 * second.loss, rel=1e-12)
    assert found.tokens == first.tokens + second.tokens
    assert found.record() == {
        "val/loss": found.loss,
        "val/loss/tiny": first.loss,
        "val/loss/ragged": second.loss,
    }


def test_bits_per_byte_of_a_mix_use_the_weighted_bytes_per_token():
    """A token is 4 bytes in the first dataset, which has 3/4 of the tokens, and 2 in the second."""
    scores = SplitScore("a", "a", 0.75, 2.0, 100, 400), SplitScore("b", "b", 0.25, 4.0, 300, 600)
    found = Evaluation(scores)
    assert found.bits_per_byte == pytest.approx(
        (0.75 * 2 + 0.25 * 4) / math.log(2) / (0.75 * 4 + 0.25 * 2)
    )
    assert Evaluation(scores[:1]).bits_per_byte == pytest.approx(scores[0].bits_per_byte)
    assert Evaluation((scores[0], SplitScore("b", "b", 0.25, 4.0, 300, 0))).bits_per_byte is None
    assert Evaluation(scores[:1]).record() == {"val/loss": 2.0}


def test_max_tokens_is_divided_over_a_mix_by_weight(mixed_run):
    found = score(mixed_run, max_tokens=400)
    first, second = found.by_dataset
    assert first.tokens == 300
    assert second.tokens < 100, "its mask excludes some of the hundred targets"
    assert found.bits_per_byte is None


def test_a_dataset_without_validation_text_does_not_count(
    build_run, tiny_config, tiny_set, write_tiny, tmp_path
):
    silent = write_tiny(tmp_path / "silent", num_documents=6)
    run = build_run(tiny_config(data__path=None, data__mix={str(tiny_set): 1, str(silent): 9}))
    found = score(run)
    assert [split.name for split in found.by_dataset] == ["tiny"]
    assert found.loss == found.by_dataset[0].loss
    messages = []
    warn_of_unscored(members_of(open_data(run.config.data)), SimpleNamespace(say=messages.append))
    assert messages == ["Without validation text, and not in the loss: silent."]


def test_there_is_no_loss_without_validation_text(build_run, tiny_config, write_tiny, tmp_path):
    silent = write_tiny(tmp_path / "silent", num_documents=6)
    assert score(build_run(tiny_config(data__path=str(silent)))) is None
