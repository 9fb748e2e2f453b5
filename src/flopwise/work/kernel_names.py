"""Words in the names of kernels, and what class of work they tell: from V100 to B200, and on MI300.

Tables are read from top to bottom; the first row with a word in the lower-case name decides. The tests hold names of every
library. Choices that could have been otherwise:
- a log-softmax is 'loss': language models compute it for the cross-entropy and hardly anywhere else;
- the helpers of a library call belong to the call: split-K reductions to matmul, dQ conversions to attention;
- 'copy/cast' changes place, layout or type; 'memory' fills with a constant or crosses between host and device;
- a fused kernel has the class of its most telling part: RMSNorm with a cast and a residual add is 'normalisation'.
"""

import re
from functools import cache

from flopwise.work.operation import (
    ATTENTION,
    COMMUNICATION,
    COPY,
    ELEMENTWISE,
    INDEX,
    LOSS,
    MATMUL,
    MEMORY,
    NORMALISATION,
    OPTIMIZER,
    RANDOM,
    REDUCTION,
    SOFTMAX,
)

Table = tuple[tuple[str, str], ...]  # rows of a class and its words, regular expressions with spaces between them

_KERNELS: Table = (
    # who is who among names that contain each other's words
    (
        COMMUNICATION,
        r"""nccl rccl nvshmem msccl multimem userbuffers deep_ep lamport cross_device_reduce symm_?mem quick_?reduce
        (one|two)_?shot_all_?reduce all_?reduce all_?gather reduce_?scatter all_?to_?all c10d wait_tensor
        record_param_comms""",
    ),
    (COPY, r"^memcpy\s(dtod|device) ^memcpyd2d"),
    (MEMORY, r"^memset ^memcpy ^copybuffer ^fillbuffer __amd_rocclr_(copy|fill)buffer"),
    (
        OPTIMIZER,
        r"""fused_?adam fused_?sgd fused_?adagrad fusedoptimizer adam_?w?_(kernel|cuda) adamfunctor adamcapturable
        adamw_(norm|prepare|update)_kernel lamb(stage|functor) kernel_?optimizer koptimizer lion_(kernel|update) sgdfunctor
        (adam|lion|lamb)\w*8bit""",
    ),
    (
        LOSS,
        r"""cross_?entropy nll_?loss log_?softmax logsoftmax softmaxcrossentropy xent _loss_
        loss_(kernel|forward|backward) mse_kernel smooth_l1 huber kl_div ctc_loss binary_cross""",
    ),
    (
        NORMALISATION,
        r"""rms_?norm layer_?norm group_?norm batch_?norm rowwisemoments instance_?norm \bln_(fwd|bwd) gammabetabackward
        computegradgamma computeinternalgradients cuda_?apply_?layer add_norm norm_fwd norm_bwd l2_?norm_(fwd|bwd)
        bn_(fw|bw)_ computefusedparams compute_gi_kernel""",
    ),
    (
        ELEMENTWISE,
        r"""rotary _rope rope_ applyrope swiglu geglu silu_?and_?mul gelu_?and_?mul act_and_mul gated_?act dswiglu""",
    ),
    (INDEX, r"reshape_and_cache append_?paged (store|write|set|update|copy|concat)_\w*kv_?(cache|buffer)"),
    # fused attention: every generation, flopwise's own, and the kernels around it
    (
        ATTENTION,
        r"""flash_(forward|delta|dkdv|dq)_kernel flash_?(fwd|bwd|attn|attention|fprop|bprop) pytorch_flash flash:: fmha
        sdpa flex_(attention|decoding) attention attn_(fwd|bwd|kernel) _attn attn:: paged_?att \bmha_ mla_(fwd|decode)
        unified_att scaled_?dot dot_do_o convert_dq bwd_(kernel_)?(dk_?dv|dq|preprocess) batchprefill batchdecode
        singleprefill""",
    ),
    (SOFTMAX, r"softmax"),
    # cuBLAS, cuBLASLt, CUTLASS, cuDNN convolutions, Tensile, Composable Kernel, Triton
    (
        MATMUL,
        r"""nvjet splitk_?reduce split_?k_?reduction cublaslt?:: gemm gemv gemk1 \bcijk_ wgrad dgrad fprop implicit_con
        xmma s1688 s16816 h884 winograd convol cudnn.*conv conv\dd_ conv_depthwise conv_transpose _conv_ scudnn bmm_ cask matmul
        \b_?(b?mm|mv)_kernel ^triton_(b?mm|addmm) addmm _mm$ dot_kernel reduce_1block_kernel magma.*mm ck_tile::gemm
        fused_moe_kernel fused_?moe marlin cutlass.*::kernel2?< bf16gemm kernel_grouped scaled_mm hipblaslt tensile""",
    ),
    (
        RANDOM,
        r"""philox curand distribution_ bernoulli dropout random_kernel randperm exponential_kernel multinomial
        \brand_""",
    ),
    (MEMORY, r"tril triu arange range_cuda linspace elementwise_kernel_with_index"),
    # moving by index, counting and sorting
    (
        INDEX,
        r"""embedding index gather scatter take_put masked_select topk top_k sort bitonic cub::.*(unique|select|scan)
        rocprim.*(sort|partition|scan|select) thrust.*(unique|scan|copy_if) histogram bincount nonzero searchsorted
        krn_partial compute_num_of_partial compute_grad_weight sum_and_scatter moe_align moe_sum moe_permute routing""",
    ),
    # many tensors in one kernel: an optimizer's, unless nothing says so (see kernel_class.classify)
    (
        REDUCTION,
        r"multi_tensor_apply_kernel.*(lpnorm|lpmax|norm) multi_?tensor_?l2 l2normfunctor foreach_(norm|max(?!imum))",
    ),
    (COPY, r"multi_tensor_apply_kernel.*copy foreach_(copy|clone)"),
    (MEMORY, r"foreach_zero"),
    (ELEMENTWISE, r"multi_tensor_apply foreach"),
    # one functor in a generic loop: the functor tells
    (MEMORY, r"fillfunctor (?<!masked_)fill_kernel zero_kernel memset set_?zero"),
    (
        COPY,
        r"""direct_copy (bfloat16|float16|float8\w*|half)_copy_kernel copy_kernel catarraybatchedcopy cat_array copy_device
        transpose permute contiguous nchwto nhwcto convert_?tensor tensor_?transform cast_kernel cast_transpose quantiz
        quant_ _quant cast_to_fp8 fp8_cast dequant pad_kernel padding split_with_sizes chunk_cat roll_cuda flip_""",
    ),
    (
        REDUCTION,
        r"""reduce_kernel reduce_?op reduction devicereduce segmented_?reduce block_?reduce _reduce_ reducekernel cumsum
        scan_(inner|outer) tensor_kernel_scan welford amax_kernel absmax amax""",
    ),
    (
        ELEMENTWISE,
        r"""elementwise functor silu gelu relu sigmoid tanh pointwise where_kernel masked_fill bias_act add_bias unrolled
        vectorized addcmul binary_?op unary_?op pow_tensor rsqrt exp_kernel neg_kernel clamp lerp""",
    ),
)

# Inductor writes the fused ops into the name: triton_<heuristic>_fused_<ops>_<number>. Ops are joined by '_', which is also
# inside their names, so the parts are searched for, not split. A pointwise kernel that names an attention or a matmul op only
# prepares its operands: those words count in templates (tem, mm) alone.
_INDUCTOR = re.compile(r"^triton_(poi|red|per|tem|mm|bmm|for|spl|unk|user|comb)_(?:fused_?)?(.*?)(?:_?\d+)?$")
_TEMPLATES, _REDUCTIONS = ("tem", "mm", "bmm"), ("red", "per", "spl")
_FUSED_TEMPLATE: Table = ((ATTENTION, "attention flex_decoding"),)
_FUSED: Table = (
    (COMMUNICATION, "all_reduce all_gather reduce_scatter all_to_all"),
    (LOSS, "log_softmax nll_loss cross_entropy _loss"),
    (SOFTMAX, "softmax"),
    (OPTIMIZER, "adam _foreach_ addcdiv"),
    (NORMALISATION, "layer_norm rms_norm group_norm batch_norm var_mean mean.*rsqrt pow.*rsqrt mean.*pow"),
    (INDEX, "embedding index gather scatter sort topk nonzero searchsorted"),
)
_ALL_OF = r"^(_|{})+$"
_FUSED_POINTWISE: Table = (
    (RANDOM, _ALL_OF.format("native|dropout|bernoulli|rand|randn|randint|like|inductor|random|seeds|lookup|seed")),
    (MEMORY, _ALL_OF.format("zeros|ones|full|fill|new|empty|like|zero")),
    (
        COPY,
        _ALL_OF.format(
            "to|copy|clone|t|transpose|permute|view|unsafe|reshape|contiguous|cat|stack|slice|select|split|with|sizes|expand|"
            "squeeze|unsqueeze|unbind|chunk|alias|detach|as|strided|repeat|interleave|tile|flip|roll|pad|constant|nd|backward|"
            "scaled|dot|product|flash|efficient|cudnn|attention|flex|mm|bmm|addmm|linear|convert|element|type|float8|e4m3fn"
        ),
    ),
)


def class_of_name(text: str) -> str | None:
    """The class that a lower-case name tells; None where it says nothing.

    >>> class_of_name("ampere_sgemm_128x64_nn"), class_of_name("triton_red_fused_sum_3"), class_of_name("my_kernel")
    ('matmul', 'reduction', None)
    """
    inductor = _INDUCTOR.match(text)
    if inductor is None:
        return _first(_KERNELS, text)
    heuristic, fused = inductor.groups()
    if heuristic in _TEMPLATES:
        return _first(_FUSED_TEMPLATE, fused) or MATMUL
    if (kind := _first(_FUSED, fused)) is not None:
        return kind
    return REDUCTION if heuristic in _REDUCTIONS else _first(_FUSED_POINTWISE, fused) or ELEMENTWISE


@cache
def _compiled(table: Table) -> list[tuple[str, re.Pattern[str]]]:
    """Only when a name is asked for: it takes a while."""
    return [(kind, re.compile("|".join(words.split()))) for kind, words in table]


def _first(table: Table, text: str) -> str | None:
    return next((kind for kind, words in _compiled(table) if words.search(text)), None)
