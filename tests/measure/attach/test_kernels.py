"""Operations and kernels by class."""

from __future__ import annotations

import pytest

from flatout.measure.attach.trace import MEMORY_BOUND, kind_of

NAMES = {
    "matmul": """
        aten::mm
        aten::addmm
        mkldnn::_linear_pointwise
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64
        nvjet_tst_128x256_64x4_2x1_v_bz_TNT
        void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>
        triton_tem_fused_mm_1
    """,
    "attention": """
        aten::_scaled_dot_product_flash_attention_for_cpu
        void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>
        cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma
        triton_tem_fused_flex_attention_0
    """,
    "normalisation": """
        aten::native_layer_norm_backward
        aten::_fused_rms_norm
        triton_per_fused_native_layer_norm_1
    """,
    "elementwise": """
        aten::gelu_backward
        aten::add_
        void at::native::vectorized_elementwise_kernel<4, MulFunctor>
        triton_poi_fused_add_mul_gelu_3
        cpp_fused_add_0
    """,
    "decomposition": """
        aten::linalg_svd
        aten::_linalg_svd
        aten::linalg_cholesky_ex
    """,
    "reduction": """
        aten::sum
        triton_red_fused_sum_2
        void at::native::reduce_kernel<512, 1>
    """,
    "loss": """
        aten::nll_loss_forward
        aten::_log_softmax
        triton_red_fused__log_softmax_nll_loss_forward_4
        graph_0_cpp_fused__log_softmax_nll_loss_forward_7
    """,
    "optimizer": """
        aten::_fused_adamw_
        aten::_foreach_mul_
        void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>
        triton_for_fused_0
    """,
    "copy": """
        Memcpy HtoD (Pageable -> Device)
        aten::copy_
        aten::embedding_dense_backward
    """,
    "communication": """
        ncclDevKernel_AllReduce_Sum_f32_RING_LL
        c10d::allreduce_
    """,
    "scan": """
        aten::cumsum
        triton_spl_fused_cumsum_0
    """,
    "other": "aten::something_new",
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_has_its_class(kind):
    names = [name.strip() for name in NAMES[kind].strip().splitlines()]
    assert [kind_of(name) for name in names] == [kind] * len(names)


def test_memory_bound_classes_are_classes():
    assert {*NAMES} > MEMORY_BOUND
