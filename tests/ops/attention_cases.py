"""Shapes, windows and documents for the tests of all attention variants."""

import torch


def case(heads, groups, queries, keys=None, **more):
    return {"heads": heads, "groups": groups, "queries": queries, "keys": keys or queries, **more}


CASES = {
    "square": case(4, 4, 16),
    "odd length": case(2, 2, 37),
    "one token": case(2, 1, 1),
    "grouped": case(6, 2, 21),
    "one key head": case(4, 1, 19),
    "window": case(2, 2, 33, window=5),
    "window of one": case(2, 2, 9, window=1),
    "window over all": case(2, 1, 9, window=100),
    "documents": case(2, 2, 29, documents=4),
    "documents, window, grouped": case(4, 2, 41, documents=3, window=7),
    "heads of 128": case(2, 1, 25, window=6, documents=2, head_dim=128),
    "heads of 20": case(3, 3, 25, documents=2, head_dim=20),
    "last queries": case(4, 2, 3, 17),
    "last query": case(4, 2, 1, 17),
    "last query, window": case(2, 2, 1, 17, window=4),
}
LONG = {
    "documents": case(2, 2, 300, documents=5, head_dim=16),
    "window": case(2, 1, 300, window=50, head_dim=16),
    "window over a block": case(2, 2, 513, window=300, head_dim=16),
    "whole blocks": case(2, 2, 512, documents=2, head_dim=16),
    "one over a block": case(3, 1, 129, documents=3, window=7, head_dim=16),
    "two tokens a document": case(1, 1, 200, documents=100, head_dim=16),
    "last queries": case(4, 2, 200, 700, head_dim=64),
    "heads of 128": case(2, 1, 200, documents=3, window=70, head_dim=128),
}
"""Longer than a block of tokens, so that there is something to skip."""


def random_inputs(
    *,
    heads,
    groups,
    queries,
    keys,
    documents=None,
    window=None,
    rows=2,
    head_dim=8,
    dtype=torch.float32,
):
    generator = torch.Generator().manual_seed(heads * 1000 + queries)
    sizes = ((heads, queries), (groups, keys), (groups, keys))
    wide = {"generator": generator, "dtype": torch.float64}
    q, k, v = (torch.randn(rows, *size, head_dim, **wide).to(dtype) for size in sizes)
    ids = None
    if documents is not None:
        ids = (
            torch.randint(documents, (rows, queries), generator=generator).sort(dim=1).values.int()
        )
    return (q, k, v), {"doc_ids_BS": ids, "window": window}


def with_gradients(function, tensors, options):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, **options)
    out.backward(torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_close_to_largest(actual, expected, rtol, atol=None):
    """Check each tensor against fp64, with `atol` (`rtol`) relative to its largest value."""
    for got, want in zip(actual, expected, strict=True):
        want = want.double()
        largest = max(float(want.abs().max()), 1) if want.numel() else 1
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=(atol or rtol) * largest)
