"""Operations and kernels by class."""

from __future__ import annotations

import pytest

from flatout.measure.steps.kernels import KINDS, MEMORY_BOUND, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::bmm", "matmul"),
        ("mkldnn::_linear_pointwise", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::_fused_rms_norm", "normalisation"),
        ("aten::gelu_backward", "elementwise"),
        ("aten::add_", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "elementwise"),
        ("triton_poi_fused_add_mul_gelu_3", "elementwise"),
        ("triton_red_fused_sum_2", "reduction"),
        ("triton_per_fused_native_layer_norm_1", "normalisation"),
        ("triton_red_fused__log_softmax_nll_loss_forward_4", "loss"),
        ("cpp_fused_add_0", "elementwise"),
        ("graph_0_cpp_fused__log_softmax_nll_loss_forward_7", "loss"),
        ("triton_tem_fused_mm_1", "matmul"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_for_fused_0", "optimizer"),
        ("triton_spl_fused_cumsum_0", "scan"),
        ("aten::sum", "reduction"),
        ("void at::native::reduce_kernel<512, 1>", "reduction"),
        ("Memcpy HtoD (Pageable -> Device)", "copy"),
        ("aten::copy_", "copy"),
        ("aten::embedding_dense_backward", "copy"),
        ("aten::_fused_adamw_", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("aten::_foreach_mul_", "optimizer"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("c10d::allreduce_", "communication"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::_log_softmax", "loss"),
        ("aten::cumsum", "scan"),
        ("aten::something_new", "other"),
    ],
)
def test_a_name_has_its_class(name, kind):
    assert kind_of(name) == kind


def test_memory_bound_classes_are_classes():
    assert {*KINDS} > MEMORY_BOUND
