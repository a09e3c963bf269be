"""What steps are given: data and random numbers that spoil what is learned from them."""

from __future__ import annotations

from flatout.measure.rules import row

INPUTS = [
    row(
        "constant-inputs",
        "All inputs of the model have the same value.",
        lambda e: e.constant_inputs and "spoils",
        "All values of each input of the model are the same: it is given nothing to learn from.",
        "Look at a batch where it is made: a division of integers, a wrong scale or an overflow.",
        site="padding",
    ),
    row(
        "padded-targets",
        "The loss counts padding among its targets.",
        lambda e: e.padded_targets and "spoils",
        "{e.padded_targets[1]:.0%} of the targets of the loss are padding, of the id "
        "{e.padded_targets[0]}, which the model learns to predict.",
        lambda e, _: (
            e.padded_targets
            and f"Give the loss ignore_index={e.padded_targets[0]}. If this id also ends texts, "
            "set the targets behind each end to -100 instead."
        ),
        site="padded-loss",
    ),
    row(
        "rescaled-inputs",
        "The same data is scaled again and again.",
        lambda e: not 0.05 < e.rescaled < 20 and "spoils",
        "The inputs of the model are {e.rescaled:.2g} times as large as in the first steps: the "
        "same data is scaled again and again.",
        "Write data = (data - mean) / std, and not data.sub_(mean).div_(std), where a dataset or a "
        "cache keeps the data.",
        site="padding",
    ),
    row(
        "same-randomness",
        "Each step sets the same random seed.",
        "spoils",
        "Each step sets the seed at {site} to the number that it has already: dropout, noise, "
        "shuffling and augmentation are the same every time.",
        "Set the seed once, before the loop.",
        site="seeded",
        unless="same-batch",
    ),
    row(
        "sorted-data",
        "The rows are sorted by class.",
        lambda e: e.only_classes and "spoils",
        "The targets of a batch are of one class, or hardly more, and of others in later batches: "
        "each step unlearns the classes before.",
        lambda e, _: (
            e.only_classes == 1
            and "Look at the targets: those of all batches that were seen are of the same class."
        ),
        "Shuffle the rows: DataLoader(shuffle=True), or a new torch.randperm in each epoch.",
        site="rows padding",
        unless="same-batch",
    ),
    row(
        "uneven-rows",
        "Batches mix short and long rows, so that most of their tokens are padding.",
        lambda e: e.share((e.ragged or 0.0) * e.work_s, 0.4),
        "{share:.0%} of each step goes into padding: batches mix rows of very different lengths.",
        "Put rows of similar length into a batch: sort them by length in groups of some dozen "
        "batches, and shuffle the batches. Or pack several rows into one.",
        site="padding",
        shows="ragged",
        unless="padding",
    ),
    row(
        "unscaled-inputs",
        "The model is given numbers that are far from 1, such as pixels up to 255.",
        lambda e: e.large_inputs and "warns",
        "The model is given numbers of which many are above 20, and some above 100: updates are "
        "too large, or units saturate.",
        "Scale them: images / 255, less their mean, divided by their standard deviation.",
        site="padding",
    ),
    row(
        "unshifted-targets",
        "A language model's targets are its unshifted inputs.",
        "spoils",
        "The targets of the loss at {site} are the tokens that the model is given: it learns to "
        "repeat them. Only an autoencoder does so by design.",
        "Predict the next token: logits[:, :-1] with tokens[:, 1:].",
        site="unshifted",
    ),
]
"""Sorted by name."""
