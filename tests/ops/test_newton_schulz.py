"""Letters: N matrices of one shape, R rows, C columns."""

import math

import pytest
import torch
from op_variants import variants

from flatout.ops import newton_schulz

VARIANTS = variants(newton_schulz)


def random_inputs(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_singular_values(rows, columns, values):
    left, _ = torch.linalg.qr(random_inputs((rows, rows), 1))
    right, _ = torch.linalg.qr(random_inputs((columns, columns), 2))
    return left[:, : len(values)] @ torch.diag(values) @ right[:, : len(values)].T


@pytest.fixture(params=sorted(VARIANTS.keys() - {"bf16"}))
def iterate(request):
    """Each full-precision variant of the iterations."""
    return VARIANTS[request.param]


@pytest.mark.parametrize(
    "shape", [(3, 4, 9), (1, 11, 11), (5, 1, 3), (2, 6, 2), (4, 16, 40)], ids=str
)
def test_every_variant_matches_the_reference_in_fp64(iterate, shape):
    matrices_NRC = random_inputs(shape, 11)
    kept_NRC = matrices_NRC.clone()
    wanted_NRC = newton_schulz.reference(matrices_NRC)
    torch.testing.assert_close(iterate(matrices_NRC), wanted_NRC, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        iterate(matrices_NRC.float()).double(), wanted_NRC, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(matrices_NRC, kept_NRC)


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1e6])
def test_the_scale_of_the_gradient_does_not_matter(iterate, scale):
    matrix = random_inputs((1, 5, 8), 3, torch.float32)
    torch.testing.assert_close(iterate(matrix * scale), iterate(matrix), rtol=1e-4, atol=1e-5)
    assert torch.equal(iterate(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))
    assert iterate(torch.randn(1, 3, 3).bfloat16()).dtype == torch.float32, "on a CPU"


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 48), (8, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_approach_one_and_vectors_are_kept(iterate, rows, columns, dtype):
    values = torch.logspace(0, -2, rows, dtype=torch.float64)
    matrix = with_singular_values(rows, columns, values)
    actual = iterate(matrix.to(dtype)[None])[0]
    assert actual.dtype == dtype
    _, sizes, _ = torch.linalg.svd(actual.double(), full_matrices=False)
    assert 0.6 < sizes.min() <= sizes.max() < 1.25
    exact_left, _, exact_right = torch.linalg.svd(matrix, full_matrices=False)
    assert float((actual.double() - exact_left @ exact_right).norm() / math.sqrt(rows)) < 0.35
    aligned = torch.linalg.solve(matrix @ matrix.T, matrix @ actual.double().T)
    torch.testing.assert_close(
        aligned, aligned.T, rtol=1e-3, atol=1e-3
    )  # U diag V' with the same U and V


def test_bfloat16_on_a_cpu_is_close_to_float32():
    matrix = random_inputs((3, 64, 256), 4, torch.float32)
    actual = VARIANTS["bf16"](matrix)
    assert actual.dtype == torch.bfloat16
    expected = newton_schulz.reference(matrix)
    assert float((actual.float() - expected).norm() / expected.norm()) < 0.05
    assert not VARIANTS["bf16"](torch.zeros(2, 3, 4)).any()


@pytest.mark.gpu
@pytest.mark.gpu_essential
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_bfloat16_on_a_gpu_is_close_to_float32(variant):
    matrix = random_inputs((3, 64, 256), 4, torch.float32)
    actual = VARIANTS[variant](matrix.cuda())
    assert actual.dtype == torch.bfloat16
    expected = newton_schulz.reference(matrix)
    assert float((actual.float().cpu() - expected).norm() / expected.norm()) < 0.05
