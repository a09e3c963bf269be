"""Inputs for the tests of split-weight updates."""

import torch

from flatout.ops.split import split

NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
SHAPES = [(32, 48), (7, 5), (1, 1), (3, 1031), (64, 16), (1, 16), (0, 4), (16, 520)]
"""Full vectors and odd sizes, less than a block, several blocks with the last incomplete, and none.
"""


def random_inputs(shape, seed, size=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def lists(shapes, *, seed=0, laid_out=lambda tensor: tensor):
    """Return the inputs of an AdamW update in the middle of a run."""
    weights = [laid_out(random_inputs(shape, seed + i, 0.02)) for i, shape in enumerate(shapes)]
    highs, lows = map(list, zip(*map(split, weights), strict=True))
    gradients = [
        laid_out(random_inputs(shape, seed + 100 + i, 1e-3)) for i, shape in enumerate(shapes)
    ]
    means = [laid_out(random_inputs(shape, seed + 200 + i, 1e-3)) for i, shape in enumerate(shapes)]
    squares = [
        laid_out(random_inputs(shape, seed + 300 + i, 1e-3).square())
        for i, shape in enumerate(shapes)
    ]
    return [
        highs,
        lows,
        gradients,
        means,
        squares,
        [torch.tensor(float(i % 3)) for i in range(len(shapes))],
    ]


def copied(columns):
    return [[tensor.clone() for tensor in column] for column in columns]


def advance(steps):
    for step in steps:
        step += 1


def assert_same_bits(actual, expected):
    for one_column, other_column in zip(actual, expected, strict=True):
        for one, other in zip(one_column, other_column, strict=True):
            assert torch.equal(one, other)
