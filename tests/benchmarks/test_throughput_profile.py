"""Kernels are grouped by purpose, the update by its range; uncovered time is idle."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = {
    "matmul": [
        "nvjet_tst_128x256_64x6_2x1_2cta_v_bz_TNT",
        "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NTN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_"
            "256x128_32x3_nt_align8>(...)"
        ),
        (
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, float,"
            " true, false, false>(...)"
        ),
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(...)",
        "std::enable_if<true>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float>(...)",
        "triton_tem_fused_addmm_gelu_3",
    ],
    "attention and scan": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0",
        (
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128,"
            " 128, 4, false>>(...)"
        ),
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>(...)",
        (
            "void cutlass::device_kernel<"
            "flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>(...)"
        ),
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(...)",
        "triton_tem_fused_flex_attention_2",
        "walk",
        "gradients",
    ],
    "loss": [
        "triton_red_fused__log_softmax_16",
        "triton_red_fused__log_softmax__to_copy_prepare_softmax_online_2",
        "triton_red_fused__log_softmax_backward_data_add_nll_loss_backward_nll_loss_forward_2",
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float,"
            " at::native::LogSoftMaxForwardEpilogue>(...)"
        ),
        (
            "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float,"
            " float, long>(...)"
        ),
        "liger_cross_entropy_kernel",
    ],
    "norm and elementwise": [
        "triton_poi_fused_add_gelu_mul_0",
        "triton_per_fused_native_layer_norm_native_layer_norm_backward_1",
        "triton_poi_fused__scaled_dot_product_cudnn_attention_cat_4",
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>,"
            " std::array<char*, 1>>(...)"
        ),
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(...)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ...>>(...)",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>(...)",
        "void at::native::embedding_backward_feature_kernel<...>(...)",
        (
            "void at::native::unrolled_elementwise_kernel<"
            "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::...>(...)"
        ),
    ],
    "optimiser": [
        (
            "void at::native::(anonymous"
            " namespace)::multi_tensor_apply_kernel<at::native::(anonymous"
            " namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous"
            " namespace)::FusedAdamMathFunctor<float, 4, ADAM_MODE::ADAMW, false>>(...)"
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...,"
            " at::native::(anonymous namespace)::LpNormFunctor<float>>(...)"
        ),
    ],
    "copy": ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)", "Memset (Device)"],
    "other": ["void something_never_seen<4>(...)"],
}


@pytest.fixture
def profiling(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("throughput_profile")


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in NAMES.items() for name in names]
)
def test_a_kernel_is_grouped_by_its_name(profiling, group, name):
    assert profiling.group_of(name) == group


def event(name, begin, length, *, cat="kernel", tid=7, correlation=None):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": begin,
        "dur": length,
        "tid": tid,
        "args": {"correlation": correlation} if correlation else {},
    }


def test_time_is_grouped_and_uncovered_time_is_idle(profiling):
    events = [
        {"ph": "M", "name": "process_name"},
        event("aten::mm", 0, 5_000, cat="cpu_op"),
        event("Optimizer.step#AdamW.step", 1_000, 500, cat="user_annotation", tid=1),
        event("cudaLaunchKernel", 1_100, 10, cat="cuda_runtime", tid=1, correlation=11),
        event("cudaLaunchKernel", 1_700, 10, cat="cuda_runtime", tid=1, correlation=12),
        event("cuLaunchKernelEx", 1_200, 10, cat="cuda_driver", tid=2, correlation=13),
        event("nvjet_tst_128", 10_000, 4_000),
        event("Memcpy HtoD (Pinned -> Device)", 12_000, 3_000, cat="gpu_memcpy", tid=20),
        event("nvjet_tst_128", 16_000, 1_000, correlation=11),
        event("nvjet_tst_256", 17_000, 1_000, correlation=12),
        event("triton_poi_fused_add_0", 19_000, 1_000, correlation=13),
    ]
    found = profiling.grouped(events, steps=2)
    assert found["wall_ms"] == pytest.approx(5.0)
    wanted = {
        "copy": 1.5,
        "optimiser": 0.5,
        "matmul": 2.5,
        "norm and elementwise": 0.5,
        "idle": 1.0,
    }
    assert {group: found["groups"][group] for group in wanted} == pytest.approx(wanted)
    assert "other" not in found["groups"]
    assert (found["kernels"][0]["name"], found["kernels"][0]["ms"]) == (
        "nvjet_tst_128",
        pytest.approx(2.0),
    )


def test_a_profile_without_kernels_is_an_error(profiling):
    assert profiling.grouped([event("aten::mm", 0, 5, cat="cpu_op")], steps=1)["groups"] == {}


def test_steps_after_the_warm_up_are_profiled(profiling, tmp_path):
    steps = profiling.ProfiledSteps(torch.device("cpu"), 2, 2)
    matrix = torch.randn(64, 64, requires_grad=True)
    optimizer = torch.optim.SGD([matrix], lr=1e-3)
    optimizer.step = profiling.in_range(optimizer.step)
    taken = 0
    while not steps.requested():
        torch.nn.functional.cross_entropy(matrix @ matrix, torch.arange(64)).backward()
        optimizer.step()
        taken += 1
    assert taken == 4
    found = steps.groups(tmp_path)
    assert {"matmul", "loss", "optimiser"} <= {
        group for group, milliseconds in found["groups"].items() if milliseconds > 0
    }
    assert {row["name"]: row["launches"] for row in found["kernels"]}["aten::matmul"] == 1.0
    assert list(tmp_path.iterdir()) == []
