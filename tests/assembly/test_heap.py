"""Freed memory is reused: counted in page faults."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import ctypes, resource, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page would count once
import torch
from flatout.assembly.heap import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def pages(repeats):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(repeats):
        tensors = [torch.ones(n << 18) for n in (1, 40, 3)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages(10)
print(pages(10))
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's allocator")
def test_freed_memory_is_reused():
    def pages(how):
        return int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
            ).stdout
        )

    assert 4 * pages("kept") < pages("as it comes")
