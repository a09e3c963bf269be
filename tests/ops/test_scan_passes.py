"""The Triton passes of the recurrence; test_scan.py tests values and gradients.

Letters: B rows, T tokens, K eigenstates.
"""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from flatout.errors import MissingPackage
from flatout.ops import scan

triton = pytest.importorskip("triton", reason="the package triton is not installed")

from flatout.ops import scan_kernels, scan_passes  # noqa: E402

pytestmark = pytest.mark.slow


def random_inputs(rows, tokens, count, *, drive_dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    log_decay = -torch.rand(count, generator=generator)
    angle = torch.rand(count, generator=generator) * 6
    drive = torch.randn(rows, tokens, 2 * count, generator=generator).to(drive_dtype)
    return [tensor.requires_grad_() for tensor in (log_decay, angle, drive)]


def gradients(call, leaves, doc_ids):
    states = call(*leaves, doc_ids_BT=doc_ids, chunk_size=4)
    return states.detach(), *torch.autograd.grad(states.square().sum(), leaves)


def test_eigenstates_that_do_not_fill_blocks(interpreted):
    leaves = random_inputs(1, 7, scan_passes.BLOCK + 5)
    actual, expected = (gradients(each, leaves, None) for each in (scan.triton, scan.reference))
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_it_is_chunked_where_triton_does_not_run():
    leaves = random_inputs(1, 20, 2)
    results = [gradients(each, leaves, None) for each in (scan.triton, scan.chunked)]
    assert all(map(torch.equal, *results))


# torch itself uses deprecated features when it compiles.
@pytest.mark.quick_cases("bf16")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("drive_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_compiles_as_one_op_without_a_graph_break(interpreted, drive_dtype):
    leaves = random_inputs(2, 11, 3, drive_dtype=drive_dtype)
    doc_ids = (torch.arange(22) // 5).view(2, 11)

    def model(log_decay, angle, drive, **others):
        return scan.triton(-log_decay.exp(), angle, drive * 2, **others) * 3

    compiled = torch.compile(model, fullgraph=True)
    actual, expected = (gradients(each, leaves, doc_ids) for each in (compiled, model))
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)  # dtypes too


def test_a_narrow_drive_is_not_copied(interpreted, monkeypatch):
    leaves, read = random_inputs(1, 9, 2, drive_dtype=torch.bfloat16), []
    launch = scan_passes._Steps.launch

    def noted(steps, *others, **constants):
        read.append(steps.drive.data_ptr() == leaves[2].data_ptr())
        launch(steps, *others, **constants)

    monkeypatch.setattr(scan_passes._Steps, "launch", noted)
    scan.triton(*leaves, chunk_size=4)
    assert read == [True, False, True]  # the states of chunks are new tensors


@pytest.mark.parametrize(("rows", "chunk"), [(1, scan_passes.SHORT), (4, scan_passes.LONG)])
def test_chunks_are_short_when_a_gpu_would_not_be_full(rows, chunk):
    eigenvalues = torch.empty(128, device="meta")
    drive = torch.empty(rows, 32_768, 256, device="meta")
    steps = scan_passes._steps(eigenvalues, eigenvalues, drive, None, 128, backward=False)
    assert steps.chunk == chunk
    assert rows * steps.chunks * 128 // scan_passes.BLOCK >= scan_passes.FULL


def compiled(name, *, narrow="*bf16", **others):
    """Compile a kernel with documents and 128 eigenstates for an H100 or H200."""
    kernel = getattr(scan_kernels, name)
    constants = {"COUNT": 128, "ENTERED": True, "CUT": True, **others}
    constants |= {key: getattr(scan_passes, key) for key in ("AT_ONCE", "BLOCK")}
    constants["CHUNK"] = scan_passes.LONG
    types = dict.fromkeys(kernel.arg_names, "*fp32")
    types |= dict.fromkeys(("drive", "drive_grad", "states"), narrow)
    types |= {"resets": "*u8", "cuts": "*u8", "steps": "i32", "chunks": "i32"}
    if others.get("KEEPS") == "after":
        types["kept"] = narrow
    types |= dict.fromkeys(constants, "constexpr")
    signature = {key: types[key] for key in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": 1})


KERNELS = {
    "ends": ("walk", {"KEEPS": "ends", "ADDS_FIRST": False, "BACKWARD": False}),
    "ends, from the end back": ("walk", {"KEEPS": "ends", "ADDS_FIRST": True, "BACKWARD": True}),
    "states": ("walk", {"KEEPS": "after", "ADDS_FIRST": False, "BACKWARD": False}),
    "gradients": ("gradients", {"STARTED": True}),
}
REGISTERS = 128
"""Registers per thread up to which 16 warps fit on a multiprocessor, each with 4 KiB in flight."""


@pytest.mark.quick_cases("states-*bf16", "gradients-*bf16")
@pytest.mark.parametrize("narrow", ["*bf16", "*fp32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_compile_for_a_gpu_and_fit_its_registers(kernel, narrow, tmp_path):
    """No registers spill."""
    name, constants = KERNELS[kernel]
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled(name, narrow=narrow, **constants).asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    output = subprocess.check_output([tool, "--dump-resource-usage", binary], text=True)
    used = dict(re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", output))
    assert int(used["REG"]) <= REGISTERS
    assert used["STACK"] == used["SHARED"] == used["LOCAL"] == "0"


@pytest.mark.parametrize("kernel", ["states", "gradients"])
def test_kernels_round_to_nearest(kernel):
    """The error of truncation is biased and would accumulate over tokens."""
    name, constants = KERNELS[kernel]
    assembly = compiled(name, **constants).asm["ptx"]
    conversions = re.findall(r"\bcvt\.\S*bf16\S*\.f32\b", assembly)
    assert conversions
    assert all(each.startswith("cvt.rn.") for each in conversions)


def test_missing_triton_names_the_install_command(without_triton):
    with pytest.raises(MissingPackage, match="pip install triton"):
        scan.triton(*random_inputs(1, 5, 2))
