"""Shapes, windows and documents for the tests of all attention variants."""

import torch

CASES = {
    "square": {"heads": 4, "groups": 4, "queries": 16, "keys": 16},
    "odd length": {"heads": 2, "groups": 2, "queries": 37, "keys": 37},
    "one token": {"heads": 2, "groups": 1, "queries": 1, "keys": 1},
    "grouped": {"heads": 6, "groups": 2, "queries": 21, "keys": 21},
    "one key head": {"heads": 4, "groups": 1, "queries": 19, "keys": 19},
    "window": {"heads": 2, "groups": 2, "queries": 33, "keys": 33, "window": 5},
    "window of one": {"heads": 2, "groups": 2, "queries": 9, "keys": 9, "window": 1},
    "window over all": {"heads": 2, "groups": 1, "queries": 9, "keys": 9, "window": 100},
    "documents": {"heads": 2, "groups": 2, "queries": 29, "keys": 29, "documents": 4},
    "documents, window, grouped": {
        "heads": 4,
        "groups": 2,
        "queries": 41,
        "keys": 41,
        "documents": 3,
        "window": 7,
    },
    "heads of 128": {
        "heads": 2,
        "groups": 1,
        "queries": 25,
        "keys": 25,
        "window": 6,
        "documents": 2,
        "head_dim": 128,
    },
    "heads of 20": {
        "heads": 3,
        "groups": 3,
        "queries": 25,
        "keys": 25,
        "documents": 2,
        "head_dim": 20,
    },
    "last queries": {"heads": 4, "groups": 2, "queries": 3, "keys": 17},
    "last query": {"heads": 4, "groups": 2, "queries": 1, "keys": 17},
    "last query, window": {"heads": 2, "groups": 2, "queries": 1, "keys": 17, "window": 4},
    "softcap": {"heads": 4, "groups": 2, "queries": 19, "keys": 19, "softcap": 0.7},
    "softcap, documents, window": {
        "heads": 2,
        "groups": 2,
        "queries": 29,
        "keys": 29,
        "documents": 4,
        "window": 6,
        "softcap": 0.7,
    },
}

LONG = {
    "documents": {
        "heads": 2,
        "groups": 2,
        "queries": 300,
        "keys": 300,
        "documents": 5,
        "head_dim": 16,
    },
    "window": {"heads": 2, "groups": 1, "queries": 300, "keys": 300, "window": 50, "head_dim": 16},
    "window over a block": {
        "heads": 2,
        "groups": 2,
        "queries": 513,
        "keys": 513,
        "window": 300,
        "head_dim": 16,
    },
    "whole blocks": {
        "heads": 2,
        "groups": 2,
        "queries": 512,
        "keys": 512,
        "documents": 2,
        "head_dim": 16,
    },
    "one over a block": {
        "heads": 3,
        "groups": 1,
        "queries": 129,
        "keys": 129,
        "documents": 3,
        "window": 7,
        "head_dim": 16,
    },
    "two tokens a document": {
        "heads": 1,
        "groups": 1,
        "queries": 200,
        "keys": 200,
        "documents": 100,
        "head_dim": 16,
    },
    "heads of 128": {
        "heads": 2,
        "groups": 1,
        "queries": 200,
        "keys": 200,
        "documents": 3,
        "window": 70,
        "head_dim": 128,
    },
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
    softcap=None,
    rows=2,
    head_dim=8,
    dtype=torch.float32,
):
    generator = torch.Generator().manual_seed(heads * 1000 + queries)
    q, k, v = (
        torch.randn(rows, count, length, head_dim, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for count, length in ((heads, queries), (groups, keys), (groups, keys))
    )
    ids = (
        None
        if documents is None
        else torch.randint(documents, (rows, queries), generator=generator).sort(dim=1).values.int()
    )
    options = {"doc_ids_BT": ids, "window": window}
    return (q, k, v), options if softcap is None else options | {"softcap": softcap}


def with_gradients(function, tensors, options):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, **options)
    out.backward(
        torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.dtype)
    )
    return [out.detach(), *(leaf.grad for leaf in leaves)]
