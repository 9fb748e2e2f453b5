"""Kernel classes and precisions, on names as libraries write them (long template arguments cut)."""
# ruff: noqa: E501  (names of kernels are long)

import gzip
import json
import re
from pathlib import Path

import pytest

from flopwise.work.kernel_class import classify
from flopwise.work.matmul_precision import matmul_precision
from flopwise.work.operation import ATTENTION, CLASSES, ELEMENTWISE, LOSS, NORMALISATION, OPTIMIZER, SOFTMAX

FIXTURES = Path(__file__).parents[1] / "trace" / "fixtures"
AT = "void at::native::"
ANON = AT + "(anonymous namespace)::"
FOREACH = ANON + "multi_tensor_apply_kernel<" + AT[5:] + "(anonymous namespace)::"

NAMES = {
    "matmul": [
        "nvjet_sm90_tst_96x128_64x6_2x1_v_bz_NNN",
        "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_bias_TNT",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(cutlass_80::Params)",
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(cutlass_80_simt_sgemm_256x128_8x4_nt_align1::Params)",
        "cutlass3x_sm100_bstensorop_s256x192x64gemm_block_scaled_ue4m3xf4_ue4m3xf4_f32_f16_f16_256x192x256_0_tnn_align32_o_vs16",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, cutlass::gemm>>(Params)",
        "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_sgemm_128x64_nn",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn",
        "volta_h884gemm_64x64_ldg8_nn",
        "volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_tn",
        "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
        "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>(cublasGemvParams)",
        "void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, cublasGemvParamsEx<int>>(cublasGemvParamsEx<int>)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, float, false>(gemv)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false>(cublasLt::cublasSplitKParams<float>)",
        "void splitKreduce_kernel<32, 16, int, __half, __half, float, __half, true, false, false>(cublasSplitKParams<__half>)",
        "magma_sgemmEx_kernel<float, float, float, true, false, 6, 4, 6, 3, 4>",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float const>>>(cublasDotParams)",
        "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4_warpsize2x2x1_g1_tensor16x8x16",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false, 0, 0, int, float, float>(cudnnTensorStruct)",
        "triton_tem_fused_mm_12",
        "triton_tem_fused_addmm_relu_3",
        "triton_mm",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 1024u>(float*)",
        "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1",
        "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3<ck::tensor_layout::gemm::RowMajor>>(Argument)",
        "_ZN7ck_tile6kentryILi1ENS_10GemmKernelINS_13GemmPipelineEEEEEvT0_",
        "fused_moe_kernel",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>>(Params)",
        "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8, 4, 4, 4, false>>(Params)",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64, 128, 8>>(Flash_bwd_params)",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128, 64, 128>>(Flash_bwd_params, int)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80>::Params)",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::bfloat16_t>::Params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2>>>>()",
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__tensorptrbf16gmemalign16",
        "triton_tem_fused_flex_attention_5",
        "triton_tem_fused_flex_attention_backward_2",
        "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalVarSeqQ128Kv128PersistentContext",
        "_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_21BlockFmhaPipelineQRKSEEEEEvDpT1_",
        "aiter::fmha_fwd_hd128_bf16_causal_rtne",
        "attn_fwd.kd",
        "bwd_kernel_dk_dv.kd",
        "void vllm::paged_attention_v2_kernel<unsigned short, unsigned short, 128, 16, 128>(float*, float*)",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<128>>(Params)",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, false, false>(c10::BFloat16*)",
        "void (anonymous namespace)::softmax_warp_backward<float, float, float, 10, false, false>(float*, float const*)",
        ANON + "cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous namespace)::SoftMaxForwardEpilogue>(float*)",
        "triton_per_fused__softmax_add_div_4",
        "triton_red_fused__safe_softmax_mul_where_3",
        "void transformer_engine::scaled_upper_triang_masked_softmax_warp_forward<__nv_bfloat16, float, 11>(__nv_bfloat16*)",
    ],
    "normalisation": [
        ANON + "vectorized_layer_norm_kernel<float, float>(int, float, float const*, float const*, float const*, float*)",
        ANON + "layer_norm_grad_input_kernel_vectorized<float, float>(float const*, float const*)",
        ANON + "GammaBetaBackwardCUDAKernelTemplate<float, float, 32u, 8u, 64u, true, true, true, false>(long, long)",
        AT + "vectorized_rms_norm_kernel<float, float>(int, float)",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits<__nv_bfloat16>>(KernelParams)",
        "void layer_norm::ln_fwd_kernel<layer_norm::Kernel_traits<__nv_bfloat16>>(layer_norm::FwdParams)",
        "void cuApplyLayerNorm<float, float, float>(float*, float*, float*, float const*)",
        "_rms_norm_forward_kernel",
        "_layer_norm_bwd_dx_fused",
        "void flashinfer::norm::RMSNormKernel<8u, __half>(__half*, __half*, __half*, unsigned int)",
        "kernel_cutlass_kernel_flashinfernormkernelsfused_add_rmsnormFusedAddRMSNormKernel_object_at_",
        "triton_per_fused__fused_rms_norm__to_copy__unsafe_view_add_8",
        "triton_per_fused__fused_rms_norm__to_copy_embedding_0",
        "triton_red_fused_add_mean_mul_pow_rsqrt_1",
        "triton_red_fused_add_native_layer_norm_7",
    ],
    "elementwise": [
        AT + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)",
        AT + "unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>, 4, at::native::memory::LoadWithCast<2>>",
        AT + "elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::(anonymous namespace)::where_kernel_impl>>",
        AT + "vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}>",
        AT + "vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)::{lambda()#2}>",
        FOREACH + "TensorListMetadata<1>, at::native::(anonymous namespace)::BinaryOpScalarFunctor<float, 1, 1, 0>, std::plus<float>>",
        "triton_poi_fused__unsafe_view_mul_silu_6",
        "triton_poi_fused_add_gelu_2",
        "_swiglu_forward_kernel",
        "_triton_rope",
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheHeadParallelismKernel<false, 128u, 8u, 16u, __half, long>(__half*)",
        "void vllm::act_and_mul_kernel<c10::BFloat16, vllm::silu_kernel<c10::BFloat16>, true>(c10::BFloat16*)",
    ],
    "reduction": [
        AT + "reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int>>",
        AT + "reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, at::native::sum_functor<float>>>>",
        FOREACH + "TensorListMetadata<1>, at::native::(anonymous namespace)::LpNormFunctor<float, (at::native::NormType)1, float>>",
        "triton_red_fused_sum_3",
        "triton_per_fused_sum_view_2",
        "void cub::DeviceReduceSingleTileKernel<cub::DeviceReducePolicy<float>, float*, float*, int>(float*, float*, int)",
    ],
    "copy/cast": [
        AT + "elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>>",
        AT + "unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}, LoadWithCast<1>>",
        AT + "vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}>",
        ANON + "CatArrayBatchedCopy_contig<at::native::(anonymous namespace)::OpaqueType<2u>, unsigned int, 3, 128, 1>()",
        "triton_poi_fused__to_copy_t_5",
        "triton_poi_fused_clone_transpose_3",
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_transpose_view_8",
        "Memcpy DtoD (Device -> Device)",
        "void transformer_engine::detail::cast_transpose_general_kernel<8, 8, float, __nv_bfloat16, __nv_fp8_e4m3>()",
    ],
    "optimizer": [
        FOREACH + "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>",
        "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>, float, float>(long, int volatile*)",
        "void kOptimizerStatic8bit2StateBlockwise<float, 0, 256, 1>(float*, float*)",
    ],
    "embedding/index": [
        AT + "vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
        ANON + "embedding_backward_feature_kernel<float, float, long>(long const*, float const*, float*, int, long, int)",
        AT + "_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_internal_kernel<true, OpaqueType<4>, long>>",
        ANON + "indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>(at::cuda::detail::TensorInfo<float>)",
        AT + "index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl<OpaqueType<4>>>>",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy<long, long>>()",
        "void rocprim::detail::radix_sort_onesweep_kernel<rocprim::default_config>()",
        "triton_poi_fused_embedding_dense_backward_15",
    ],
    "loss": [
        ANON + "nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, float*, float const*, long const*)",
        ANON + "cunn_SoftMaxForwardSmem<4, float, float, float, at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue, long>()",
        ANON + "cunn_SoftMaxBackward<8, float, float, float, at::native::(anonymous namespace)::LogSoftMaxBackwardEpilogue>()",
        "liger_cross_entropy_kernel",
        "triton_red_fused__log_softmax_nll_loss_forward_9",
    ],
    "communication": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "nccl:all_reduce",
        "rcclGenericKernel",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)",
        "nvshmemi_transfer_rma_nbi",
    ],
    "memory": [
        AT + "vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)",
        "Memset (Device)",
        "Memcpy HtoD (Pageable -> Device)",
        "__amd_rocclr_fillBufferAligned.kd",
        "triton_poi_fused_zeros_1",
    ],
    "random": [
        ANON + "fused_dropout_kernel_vec<c10::BFloat16, float, unsigned int, 1, 4, bool>(at::cuda::detail::TensorInfo<float>)",
        ANON + "distribution_elementwise_grid_stride_kernel<float, 4, at::native::templates::cuda::normal_and_transform<float>>()",
        "triton_poi_fused_native_dropout_2",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_names_of_libraries(kind: str, name: str) -> None:
    assert classify(name) == kind


def test_every_class_but_other_has_names() -> None:
    assert set(NAMES) == set(CLASSES) - {"other"}


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten::mm", "matmul"), ("aten::addmm", "matmul"), ("aten::_scaled_mm", "matmul"), ("MmBackward0", "matmul"),
        ("aten::_softmax", "softmax"), ("aten::_softmax_backward_data", "softmax"), ("aten::_log_softmax", "loss"),
        ("aten::nll_loss_forward", "loss"), ("aten::native_layer_norm", "normalisation"), ("aten::mul_", "elementwise"),
        ("aten::_scaled_dot_product_flash_attention", "attention"), ("aten::copy_", "copy/cast"), ("aten::sum", "reduction"),
        ("aten::embedding_dense_backward", "embedding/index"), ("aten::_fused_adamw_", "optimizer"), ("aten::zero_", "memory"),
        ("c10d::allreduce_", "communication"), ("aten::bernoulli_", "random"), ("aten::gelu_backward", "elementwise"),
        ("my::op", "other"), ("", "other"),
    ],
)  # fmt: skip
def test_the_op_decides_when_the_name_does_not(op: str, kind: str) -> None:
    assert classify("kernel_0x7f", op) == kind


def test_the_name_decides_over_the_op() -> None:
    assert classify("ampere_sgemm_128x64_nn", "aten::add") == "matmul"


def test_kernels_over_many_tensors_are_the_optimizers_only_in_its_phase() -> None:
    add = NAMES["elementwise"][5]
    assert classify(add, "aten::_foreach_add_") == "elementwise"
    assert classify(add, "aten::_foreach_add_", "optimizer") == "optimizer"
    assert classify("ampere_sgemm_128x64_nn", "aten::mm", "optimizer") == "matmul"  # Shampoo, Muon


@pytest.mark.parametrize("fixture", ["h200-small-fp32-naive-2steps", "h200-small-bf16-compiled-2steps"])
def test_nothing_on_an_h200_is_other(fixture: str) -> None:
    with gzip.open(FIXTURES / f"{fixture}.kineto.json.gz") as file:
        events = json.load(file)["traceEvents"]
    kernels = {e["name"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    assert kernels
    assert {name for name in kernels if classify(name) == "other"} == set()


@pytest.mark.parametrize(
    ("name", "tensor_cores", "precision"),
    [
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_execute_kernel__5x_cublas", False, "fp32"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(cutlass_80_simt_sgemm::Params)", False, "fp32"),
        ("ampere_sgemm_128x64_nn", False, "fp32"),
        ("volta_sgemm_128x64_nn", False, "fp32"),
        ("cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_128x64x16_1x1x1_3_tnn_align1_bias_f32_relu", False, "fp32"),
        ("void gemvNSP_kernel<float, float, float, float, 1, 32, 4, 1024, cublasGemvParamsEx<int>>(int)", False, "fp32"),
        ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false>(cublasGemvParams)", False, "fp16"),
        ("magma_sgemmEx_kernel<float, float, float, true, false, 6, 4, 6, 3, 4>", False, "fp32"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(Params)", True, "tf32"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_execute_kernel__5x_cublas", True, "tf32"),
        ("sm90_xmma_gemm_f32f32_f32_nn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_on_kernel__5x_cublas", True, "tf32"),
        ("cutlass3x_sm90_tensorop_s64x128x8tf32gemm_f32_f32_f32_f32_f32_128x128x32_2x1x1_0_tnn_align4", True, "tf32"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", True, "bf16"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)", True, "bf16"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(Params)", True, "bf16"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas", True, "bf16"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas", True, "fp8"),
        ("volta_h884gemm_64x64_ldg8_nn", True, "fp16"),
        ("volta_s884gemm_fp16_128x64_ldg8_f2f_tn", True, "fp16"),
        ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", True, "fp16"),
        ("turing_h1688gemm_128x64_ldg8_nn", True, "fp16"),
        ("ampere_h16816gemm_128x64_ldg8_stages_64x3_nn", True, "fp16"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x32_16x4_nn_align1>(Params)", True, "fp64"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_i16832gemm_s8_256x128_64x3_tn_align16>(Params)", True, "int8"),
        ("nvjet_sm90_tst_96x128_64x6_2x1_v_bz_NNN", True, "bf16"),
        ("nvjet_tss_128x256_64x4_2x1_v_badd_coopA_NTN", True, "bf16"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", True, "fp16"),
        ("nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_bias_TNT", True, "fp8"),
        ("nvjet_sm100_ootst_128x128_256x7_4x1_2cta_v_bx_Avec16UE4M3_Bvec16UE4M3_TNT", True, "fp4"),
        ("nvjet_sm90_sss_128x256_TNT", True, "tf32"),
        ("nvjet_sm100_sss_128x256_TNT", True, "unknown"),
        ("nvjet_sm90_xyz_128x256_TNT", True, "unknown"),
        ("cutlass3x_sm100_bstensorop_s256x192x64gemm_block_scaled_ue4m3xf4_ue4m3xf4_f32_f16_f16_256x192x256_0_tnn", True, "fp4"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1", True, "bf16"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN", True, "fp16"),
        ("Cijk_Ailk_Bljk_SB_MT64x64x8_SE_K1", False, "fp32"),
        ("triton_tem_fused_mm_12", None, "unknown"),
    ],
)  # fmt: skip
def test_units_and_precision(name: str, tensor_cores: bool | None, precision: str) -> None:
    assert matmul_precision(name) == (tensor_cores, precision)


@pytest.mark.parametrize(
    "name", ["void cublasLt::splitKreduce_kernel<32, 16, int, float>(float*)", "Memset (Device)", "_triton_rope", ""]
)
def test_no_product_no_precision(name: str) -> None:
    assert matmul_precision(name) is None


OWN = {
    ATTENTION: ("attention_triton", "attention_backward"),
    NORMALISATION: ("rms_norm",),
    SOFTMAX: ("softmax",),
    ELEMENTWISE: ("gelu", "swiglu", "rope"),
    LOSS: ("cross_entropy", "cross_entropy_rows"),
    OPTIMIZER: ("adamw", "adamw_kernels"),
}


@pytest.mark.parametrize(("kind", "file"), [(kind, file) for kind, files in OWN.items() for file in files])
def test_every_kernel_of_our_own_has_its_class_by_its_name_and_by_its_op(kind, file):
    source = (Path(__file__).parents[2] / "src/flopwise/kernels" / f"{file}.py").read_text()
    kernels = re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)
    ops = re.findall(r'custom_op\("(flopwise::\w+)"', source)
    assert kernels or ops
    assert {classify(kernel) for kernel in kernels} <= {kind}
    assert {classify("triton_kernel", op) for op in ops} <= {kind}
