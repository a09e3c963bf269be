"""What is Triton's own about the recurrence; that it is right, test_scan.py shows. Letters: B rows, T tokens, K eigenstates."""

import sys

import pytest
import torch

import flatout.ops
from flatout.errors import MissingPackage
from flatout.ops import scan

triton = pytest.importorskip("triton", reason="the package triton is not installed")

from flatout.ops import scan_kernels, scan_passes  # noqa: E402


def drawn(rows, tokens, count, *, drive_dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    log_decay = -torch.rand(count, generator=generator)
    angle = torch.rand(count, generator=generator) * 6
    drive = torch.randn(rows, tokens, 2 * count, generator=generator).to(drive_dtype)
    return [tensor.requires_grad_() for tensor in (log_decay, angle, drive)]


def gradients(call, leaves, doc_ids):
    states = call(*leaves, doc_ids_BT=doc_ids, chunk_size=4)
    return states.detach(), *torch.autograd.grad(states.square().sum(), leaves)


def test_eigenstates_that_fill_no_whole_blocks(interpreted):
    leaves = drawn(1, 7, scan_passes.BLOCK + 5)
    for found, wanted in zip(gradients(scan.triton, leaves, None), gradients(scan.reference, leaves, None), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler makes objects of its functions
@pytest.mark.parametrize("drive_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_compiler_sees_one_op_and_no_break(interpreted, drive_dtype):
    leaves, doc_ids = drawn(2, 11, 3, drive_dtype=drive_dtype), (torch.arange(22) // 5).view(2, 11)

    def model(log_decay, angle, drive, **others):
        return scan.triton(-log_decay.exp(), angle, drive * 2, **others) * 3

    for found, wanted in zip(gradients(torch.compile(model, fullgraph=True), leaves, doc_ids), gradients(model, leaves, doc_ids), strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


def test_a_narrow_drive_is_read_as_it_is(interpreted, monkeypatch):
    leaves, read = drawn(1, 9, 2, drive_dtype=torch.bfloat16), []
    launch = scan_passes._Steps.launch
    monkeypatch.setattr(
        scan_passes._Steps, "launch", lambda steps, *others, **constants: (read.append(steps.drive), launch(steps, *others, **constants))
    )
    scan.triton(*leaves, chunk_size=4)
    assert [tensor.data_ptr() == leaves[2].data_ptr() for tensor in read] == [True, False, True]  # what chunks are made into is new


@pytest.mark.parametrize(("rows", "chunk"), [(1, scan_passes.SHORT), (4, scan_passes.LONG)])
def test_chunks_are_short_where_a_gpu_would_not_be_full(rows, chunk):
    eigenvalues, drive = torch.empty(rows, 32_768, 128, device="meta"), torch.empty(rows, 32_768, 256, device="meta")
    steps = scan_passes._steps(eigenvalues, eigenvalues, drive, None, 128, backward=False)
    assert steps.chunk == chunk
    assert rows * steps.chunks * 128 // scan_passes.BLOCK >= scan_passes.FULL


@pytest.mark.parametrize(("name", "form"), [("walk", "fixed"), ("walk", "polar"), ("gradients", "fixed"), ("gradients", "polar")])
def test_kernels_compile_for_a_gpu_that_is_not_here(name, form):
    """Down to the binary for an H100 or H200, with everything on."""
    kernel = getattr(scan_kernels, name)
    constants = {"COUNT": 128, "ENTERED": True, "FORM": form, "CUT": True, "CHUNK": 32, "AT_ONCE": 8, "BLOCK": 32}
    constants |= {"KEEPS": "ends", "ADDS_FIRST": True, "BACKWARD": True} if name == "walk" else {"STARTED": True}
    types = dict.fromkeys(kernel.arg_names, "*fp32") | {
        "drive": "*bf16",
        "drive_grad": "*bf16",
        "resets": "*u8",
        "cuts": "*u8",
        "logs": "*fp64",
        "angles": "*fp64",
    }
    types |= {"steps": "i32", "chunks": "i32"} | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, {key: types[key] for key in kernel.arg_names}, constants)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    assert triton.compile(source, target=target, options={"num_warps": 1}).asm["cubin"]


def test_where_triton_does_not_run_it_is_chunked():
    leaves = drawn(1, 20, 2)
    for found, wanted in zip(gradients(scan.triton, leaves, None), gradients(scan.chunked, leaves, None), strict=True):
        assert torch.equal(found, wanted)


def test_without_triton_it_says_how_to_install_it(monkeypatch):
    for name in ("scan_kernels", "scan_passes"):
        monkeypatch.delitem(sys.modules, f"flatout.ops.{name}")
        monkeypatch.delattr(flatout.ops, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(scan, "_runs_triton", lambda tensor: True)
    with pytest.raises(MissingPackage, match="pip install triton"):
        scan.triton(*drawn(1, 5, 2))
