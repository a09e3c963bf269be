"""Compares Liger's kernels in Triton's interpreter with the reference.

Runs in a separate process with TRITON_INTERPRET=1 and prints "all agree" on success.
"""

import liger_kernel.ops.cross_entropy as kernels
import numpy
import triton.language as tl
from attention_cases import assert_close_to_largest
from test_cross_entropy import CASES, EXTRAS, random_inputs, with_gradients
from triton.runtime import interpreter

from flatout.ops import cross_entropy

# The interpreter passes floats without a Triton type to kernels, and lacks tanh.
bare = interpreter._implicit_cvt


def with_triton_types(given):
    if isinstance(given, float):
        return tl.tensor(
            interpreter.TensorHandle(numpy.array([given], numpy.float32), tl.float32), tl.float32
        )
    return bare(given)


interpreter._implicit_cvt = with_triton_types
kernels.tanh = lambda x: 1 - 2 / (tl.exp(2 * x) + 1)


def by_liger(hidden, weight, targets, *, softcap=None, z_loss=0.0):
    hidden, valid = cross_entropy._valid_only(hidden, weight, targets)
    return cross_entropy._by_liger(
        hidden.flatten(0, 1), weight, targets.flatten(), softcap, z_loss
    ), valid.sum()


for case in ("some ignored", "one target", "all ignored"):
    hidden, weight, targets = random_inputs(**CASES[case])
    for extras in EXTRAS.values():
        exact = hidden.double(), weight.double(), targets
        expected = with_gradients(cross_entropy.reference, *exact, **extras)
        actual = with_gradients(by_liger, hidden, weight, targets, **extras)
        assert_close_to_largest(actual, expected, 1e-5)
    alone = weight.clone().requires_grad_()
    by_liger(hidden, alone, targets)[0].backward()
    expected = with_gradients(cross_entropy.reference, *exact)[3]
    assert_close_to_largest([alone.grad], [expected], 1e-5)
print("all agree")
