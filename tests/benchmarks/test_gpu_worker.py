"""The FFT form of the recurrence, a baseline, matches the reference."""

import pytest
import torch

from flatout.ops import scan


@pytest.mark.parametrize("documents", [False, True])
def test_it_matches_the_reference_gradients_included(benchmark, documents):
    generator = torch.Generator().manual_seed(0)
    leaves = [
        -torch.rand(3, generator=generator, dtype=torch.float64),
        torch.rand(3, generator=generator, dtype=torch.float64),
        torch.randn(2, 37, 6, generator=generator, dtype=torch.float64),
    ]
    doc_ids = (torch.arange(37) >= 9).int().expand(2, -1) if documents else None
    found = []
    for function in (scan.reference, benchmark.fft):
        given = [leaf.clone().requires_grad_() for leaf in leaves]
        states = function(*given, doc_ids_BT=doc_ids, chunk_size=8)
        states.square().sum().backward()
        found.append([states.detach(), *(leaf.grad for leaf in given)])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
