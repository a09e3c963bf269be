"""Print what oneDNN says when the operating system rejects it memory.

It runs until the first of its errors that is not one of torch's own allocator.
"""

import resource
from pathlib import Path

import torch

from flatout.training.out_of_memory import is_out_of_memory

torch.set_num_threads(1)
weight = torch.randn(2048, 512)


def multiply(rows):
    return torch.ops.mkldnn._linear_pointwise(torch.randn(rows, 512), weight, None, "none", [], "")


def limit(more_bytes):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = resource.RLIM_INFINITY
    if more_bytes is not None:
        most = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def first_message():
    """Each number of rows is another kernel, whose code needs memory."""
    rows = 64
    for more_bytes in range(5_000_000, 60_000_000, 5_000_000):
        limit(more_bytes)
        for _ in range(40):
            rows += 1
            try:
                multiply(rows)
            except RuntimeError as error:
                if "DefaultCPUAllocator" not in str(error):
                    limit(None)
                    return error
        limit(None)
    return None


error = first_message()
print(error, is_out_of_memory(error) if error is not None else None, sep="\n")
