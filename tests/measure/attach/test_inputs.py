"""What the inputs of forward passes show: padding, and the same rows in every step."""

from __future__ import annotations

import pytest
import torch

from flatout.measure.attach.inputs import Batches, Inputs, classes_in, padding_id, sorted_classes


def padded(lengths, width=64, *, left=False):
    """Return different tokens of some lengths, padded with 0."""
    rows = torch.zeros(len(lengths), width, dtype=torch.long)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True), 1):
        row[width - length if left else 0 :][:length] = 100 * number + torch.arange(length)
    return rows


def padding(*args, **kwargs):
    inputs = Inputs()
    inputs.look(args, kwargs, reads=True)
    return inputs.found()["padding"]


@pytest.mark.parametrize("left", [False, True])
def test_columns_of_padding_are_those_beyond_the_longest_row(left):
    tokens = padded([5, 16, 9], left=left)
    assert padding(tokens) == 0.75
    mask, types = (tokens != 0).long(), torch.zeros_like(tokens)
    given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": types, "labels": mask}
    assert padding(**given) == padding(given) == 0.75
    assert padding(tokens, mask.bool()) == 0.75
    assert padding(tokens.t(), padded([4, 9, 2], 20).t()) == 0.75  # with time first


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": padded([5, 64]), "attention_mask": padded([5, 64]) != 0},
        {"input_ids": padded([64, 64]), "attention_mask": torch.ones(2, 64, dtype=torch.long)},
    ],
)
def test_batches_that_are_as_wide_as_their_longest_row_have_no_padding(inputs):
    assert padding(inputs) == 0.0


def test_inputs_that_are_no_tokens_say_nothing_about_padding():
    ones, narrow = torch.ones(2, 64, dtype=torch.long), padded([3, 3], width=8)
    others = torch.zeros(4, 64), torch.zeros(4, 0, dtype=torch.long), torch.zeros(4, 3, 64)
    assert padding(ones, narrow, *others) is padding(narrow) is padding(*others) is None
    mask = padded([60, 62]) != 0
    assert padding(mask) is padding(mask.long()) is padding(5 * ones) is None


def test_padding_is_not_looked_for_where_tensors_have_no_values():
    tokens, seen = padded([5, 16, 9]), []
    torch.vmap(lambda rows: seen.append(padding(rows)) or rows)(tokens[None])
    assert seen == [None]
    assert padding(tokens.to("meta")) is None


ROWS, MEMORY = torch.arange(80.0).view(20, 4), torch.empty(2, 4)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (lambda step: ROWS[:2].clone(), 2),
        (lambda step: {"x": [ROWS[:2].clone(), torch.ones(2)]}, 2),
        (lambda step: ROWS[2 * step : 2 * step + 2], None),
        (lambda step: torch.tensor([[0.0, step], [0.0, 1.0]]), None),  # rows of one beginning
        (lambda step: ROWS[: 2 + step % 2].clone(), None),
        (lambda step: ROWS[: 2 + step // 6].clone(), 2),  # looks are over by then
        (lambda step: MEMORY.copy_(ROWS[2 * step : 2 * step + 2]), None),
        (lambda step: MEMORY.copy_(ROWS[:2]), 2),
        (lambda step: {"text": [f"{step}"], "weights": torch.ones(2)}, None),
        (lambda step: step, None),
    ],
    ids=[
        "first rows",
        "in a dict",
        "in turn",
        "one beginning",
        "lengths",
        "later",
        "one memory",
        "its rows",
        "texts",
        "no tensor",
    ],
)
def test_batches_with_the_same_values_are_noticed(batch, rows):
    batches = Batches()
    for step in range(9):
        batches.look(batch(step))
    assert batches.rows == rows


IMAGES = (255 * torch.rand(6, 8, 3, 16, generator=torch.Generator().manual_seed(0))).round()


@pytest.mark.parametrize(
    ("pass_", "found"),
    [
        (lambda step: [torch.zeros(8, 16)], "constant_inputs"),
        (lambda step: [torch.zeros(8, 16), torch.ones(8, 16, dtype=torch.bool)], "constant_inputs"),
        (lambda step: [torch.full((8, 16), 0.1 * step)], "constant_inputs"),
        (lambda step: [torch.zeros(8, 16), IMAGES[step] / 255], ""),
        (lambda step: [torch.zeros(8, 16) if step else IMAGES[0] / 255], ""),
        (lambda step: [torch.zeros(8)], ""),  # the time of a differential equation
        (lambda step: [torch.zeros(8, 16), IMAGES[step, 0, 0]], ""),  # a state, and a few values
        (lambda step: [IMAGES[step]], "large_inputs"),
        (lambda step: [IMAGES[step].long()], ""),  # tokens
        (lambda step: [IMAGES[step] - 128], "large_inputs"),
        (lambda step: [IMAGES[step] / 10], ""),
        (lambda step: [IMAGES[step] / 25 + 1000], ""),  # near each other, as days are
        (lambda step: [IMAGES[step].requires_grad_() * 1], ""),  # made by another layer
    ],
)
def test_inputs_whose_values_tell_nothing_or_are_not_scaled_are_noticed(pass_, found):
    inputs = Inputs()
    for step in range(6):
        inputs.look(pass_(step), {}, reads=True)
    seen = inputs.found()
    assert {name for name in ("constant_inputs", "large_inputs") if seen[name]} == {*found.split()}


TOKENS = padded([5, 16, 9, 30], width=32)
TARGETS = {
    "rows first": (TOKENS, 0),
    "rows last": (TOKENS.t(), 0),
    "flattened": (TOKENS.flatten(), 0),
    "flattened, rows last": (TOKENS.t().flatten(), 0),
    "left": (padded([5, 16, 9, 30], width=32, left=True), 0),
    "ignored": (TOKENS.masked_fill(TOKENS == 0, -100), -100),
    "all of a length": (padded([16, 16, 16, 16], width=32), None),
    "half of all rows": (torch.cat([torch.zeros(4, 16), torch.ones(4, 16)], 1).long(), None),
    "little of it": (padded([31, 32, 29, 30], width=32), None),
    "also in the middle": (TOKENS.index_fill(1, torch.tensor([2]), 0), None),
    "text": (torch.arange(128).reshape(4, 32) % 7, None),
    "classes": (torch.tensor([0, 1, 0, 0]), None),
    "of other rows": (torch.arange(30), None),
    "numbers": (TOKENS.float(), None),
    "images": (torch.zeros(4, 8, 8, dtype=torch.long), None),
}


@pytest.mark.parametrize(("targets", "number"), TARGETS.values(), ids=TARGETS)
def test_padding_among_targets_is_what_fills_up_rows(targets, number):
    found = padding_id(targets, rows=4)
    assert found == (None if number is None else (number, 1 - 60 / 128))


@pytest.mark.parametrize("is_time_first", [False, True])
def test_padding_in_rows_of_different_lengths_and_data_that_is_scaled_again_are_measured(
    is_time_first,
):
    inputs, kept = Inputs(), torch.full((8, 16), 4.0)
    tokens = padded([3, 40, 6, 64, 5, 20], width=64)
    for _ in range(3):
        inputs.look([kept.clone(), tokens.t() if is_time_first else tokens], {}, reads=True)
    found = inputs.found([[kept / 100], [kept / 90]])
    assert found["ragged"] == pytest.approx(1 - 138 / 384)
    assert found["rescaled"] == pytest.approx(1 / 90)
    learned = kept.clone().requires_grad_()
    for _ in range(2):
        inputs.look([learned], {}, reads=True)
    assert Inputs().found([[learned * 30], [learned * 30]])["rescaled"] == 1.0
    assert inputs.found([[kept / 100], [kept * 90]])["rescaled"] == 1.0, "both ways"
    made = kept.clone().requires_grad_() / 100  # by another layer
    assert inputs.found([[made], [made]])["rescaled"] == 1.0
    assert inputs.found([[kept], [kept]], worked=6)["ragged"] is None, "padding is left out"
    assert Inputs().found([[kept], [kept]])["rescaled"] == 1.0


LABELS = torch.arange(2000) // 100
BATCHES = {
    "sorted": (lambda step: LABELS[64 * step :][:64], 6),
    "one class in each": (lambda step: LABELS[100 * step :][:32], 8),
    "two classes in two of the batches": (lambda step: LABELS[40 * step :][:32], 4),
    "one class": (lambda step: torch.full((4, 8), 3), 1),
    "one class, and ignored rows": (lambda step: torch.tensor([step % 2] * 8 + [-100] * 8), 2),
    "shuffled": (lambda step: LABELS[torch.arange(64) * 7 + step], None),
    "a rare class": (lambda step: torch.tensor([0] * 15 + [int(step == 3)]), None),
    "few rows of one class": (lambda step: torch.zeros(8, dtype=torch.long), None),
    "one row": (lambda step: torch.tensor([step]), None),
    "different tokens": (lambda step: torch.arange(64) + 64 * step, None),
    "numbers": (lambda step: torch.ones(64), None),
}


@pytest.mark.parametrize(("batch", "classes"), BATCHES.values(), ids=BATCHES)
def test_targets_that_are_sorted_by_class_are_told_from_shuffled_ones(batch, classes):
    assert sorted_classes([classes_in(batch(step)) for step in range(8)]) == classes
