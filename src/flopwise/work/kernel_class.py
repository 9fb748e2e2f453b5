"""What kind of work a kernel does, told from its name; where the name does not say, from the op above it.

The tables below are read from top to bottom; the first pattern found in the lower-case name decides. They cover
the names that libraries give their kernels from V100 to B200 and on MI300: the tests hold names of every family.

Choices that could have been otherwise:
- a log-softmax is 'loss': language models compute it for the cross-entropy and hardly anywhere else;
- the helpers of a library call belong to the call: split-K reductions to matmul, dQ conversions to attention;
- 'copy/cast' changes place, layout or type; 'memory' fills with a constant or crosses between host and device;
- a fused kernel has the class of its most telling part: RMSNorm with a cast and a residual add is 'normalisation'.
"""

import re
from functools import lru_cache

from flopwise.work.kernel_spelling import LONGEST_MATCHED
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
    OTHER,
    RANDOM,
    REDUCTION,
    SOFTMAX,
)

Table = tuple[tuple[str, str], ...]

# Inductor writes the fused ops into the name: triton_<heuristic>_fused_<ops>_<number>. Ops are joined by '_', which is also
# inside their names, so the parts are found, not split. A pointwise kernel that names an attention or a matmul op only
# prepares its operands: those words count in templates (tem, mm) alone.
FUSED_TEMPLATE: Table = ((r"flex_attention|flex_decoding|attention", ATTENTION), (r"", MATMUL))
FUSED: Table = (
    (r"all_reduce|all_gather|reduce_scatter|all_to_all", COMMUNICATION),
    (r"log_softmax|nll_loss|cross_entropy|_loss", LOSS),
    (r"softmax", SOFTMAX),
    (r"adam|_foreach_|lerp.*addcdiv|addcdiv", OPTIMIZER),
    (r"layer_norm|rms_norm|group_norm|batch_norm|var_mean|mean.*rsqrt|pow.*rsqrt|mean.*pow", NORMALISATION),
    (r"embedding|index|gather|scatter|sort|topk|nonzero|searchsorted", INDEX),
)
FUSED_REDUCTION: Table = ((r"", REDUCTION),)
FUSED_POINTWISE: Table = (
    (r"^(_|native|dropout|bernoulli|rand|randn|randint|like|inductor|random|seeds|lookup|seed)+$", RANDOM),
    (r"^(_|zeros|ones|full|fill|new|empty|like|zero)+$", MEMORY),
    (
        r"^(_|to|copy|clone|t|transpose|permute|view|unsafe|reshape|contiguous|cat|stack|slice|select|split|with|sizes|expand|"
        r"squeeze|unsqueeze|unbind|chunk|alias|detach|as|strided|repeat|interleave|tile|flip|roll|pad|constant|nd|backward|"
        r"scaled|dot|product|flash|efficient|cudnn|attention|flex|mm|bmm|addmm|linear|convert|element|type|float8|e4m3fn)+$",
        COPY,
    ),
    (r"", ELEMENTWISE),
)

NAMES: Table = (
    # who is who among names that contain each other's words
    (r"nccl|rccl|nvshmem|msccl|multimem|userbuffers|deep_ep|lamport|cross_device_reduce|symm_?mem|quick_?reduce", COMMUNICATION),
    (r"(one|two)_?shot_all_?reduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", COMMUNICATION),
    (r"^memcpy (dtod|device)|^memcpyd2d", COPY),
    (r"^memset|^memcpy|^copybuffer|^fillbuffer|__amd_rocclr_(copy|fill)buffer", MEMORY),
    (r"fused_?adam|fused_?sgd|fused_?adagrad|fusedoptimizer|adam_?w?_(kernel|cuda)|adamfunctor|adamcapturable", OPTIMIZER),
    (r"adamw_(norm|prepare|update)_kernel", OPTIMIZER),  # flopwise's own
    (r"lamb(stage|functor)|kernel_?optimizer|koptimizer|lion_(kernel|update)|sgdfunctor|(adam|lion|lamb)\w*8bit", OPTIMIZER),
    (r"cross_?entropy|nll_?loss|log_?softmax|logsoftmax|softmaxcrossentropy|xent|_loss_|loss_(kernel|forward|backward)", LOSS),
    (r"mse_kernel|smooth_l1|huber|kl_div|ctc_loss|binary_cross", LOSS),
    (r"rms_?norm|layer_?norm|group_?norm|batch_?norm|rowwisemoments|instance_?norm|\bln_(fwd|bwd)", NORMALISATION),
    (r"gammabetabackward|computegradgamma|computeinternalgradients|cuda_?apply_?layer|add_norm|norm_fwd|norm_bwd", NORMALISATION),
    (r"l2_?norm_(fwd|bwd)|bn_(fw|bw)_|computefusedparams|compute_gi_kernel", NORMALISATION),
    (r"rotary|_rope|rope_|applyrope|swiglu|geglu|silu_?and_?mul|gelu_?and_?mul|act_and_mul|gated_?act|dswiglu", ELEMENTWISE),
    (r"reshape_and_cache|append_?paged|(store|write|set|update|copy|concat)_\w*kv_?(cache|buffer)", INDEX),
    # fused attention: every generation, and the kernels around it
    (r"flash_(forward|delta|dkdv|dq)_kernel", ATTENTION),  # flopwise's own
    (r"flash_?(fwd|bwd|attn|attention|fprop|bprop)|pytorch_flash|flash::|fmha|sdpa|flex_(attention|decoding)", ATTENTION),
    (r"attention|attn_(fwd|bwd|kernel)|_attn|attn::|paged_?att|\bmha_|mla_(fwd|decode)|unified_att|attentionkernel", ATTENTION),
    (r"dot_do_o|convert_dq|bwd_(kernel_)?(dk_?dv|dq|preprocess)|batchprefill|batchdecode|singleprefill", ATTENTION),
    (r"softmax", SOFTMAX),
    # matmul: cuBLAS, cuBLASLt, CUTLASS, cuDNN convolutions, Tensile, Composable Kernel, Triton
    (r"nvjet|splitk_?reduce|split_?k_?reduction|cublaslt?::|gemm|gemv|gemk1|\bcijk_|wgrad|dgrad|fprop|implicit_con", MATMUL),
    (r"xmma|s1688|s16816|h884|winograd|convolve|cudnn.*conv|conv\dd_|conv_depthwise|_conv_|scudnn|bmm_|cask", MATMUL),
    (r"matmul|\b_?(b?mm|mv)_kernel|^triton_(b?mm|addmm)|addmm|dot_kernel|reduce_1block_kernel|magma.*mm|ck_tile::gemm", MATMUL),
    (r"fused_moe_kernel|fused_?moe|marlin|cutlass.*::kernel2?<|bf16gemm|kernel_grouped|scaled_mm|hipblaslt|tensile", MATMUL),
    # random numbers
    (r"philox|curand|distribution_|bernoulli|dropout|random_kernel|randperm|exponential_kernel|multinomial|\brand_", RANDOM),
    (r"tril|triu|arange|range_cuda|linspace|elementwise_kernel_with_index", MEMORY),
    # moving by index, counting and sorting
    (r"embedding|index|gather|scatter|take_put|masked_select|topk|top_k|sort|bitonic|cub::.*(unique|select|scan)", INDEX),
    (r"rocprim.*(sort|partition|scan|select)|thrust.*(unique|scan|copy_if)|histogram|bincount|nonzero|searchsorted", INDEX),
    (r"krn_partial|compute_num_of_partial|compute_grad_weight|sum_and_scatter|moe_align|moe_sum|moe_permute|routing", INDEX),
    # many tensors in one kernel: an optimizer's, unless nothing says so (see classify)
    (r"multi_tensor_apply_kernel.*(lpnorm|lpmax|norm)|multi_?tensor_?l2|l2normfunctor|foreach_norm", REDUCTION),
    (r"multi_tensor_apply_kernel.*(copy)", COPY),
    (r"multi_tensor_apply|foreach", ELEMENTWISE),
    # one functor in a generic loop: the functor tells
    (r"fillfunctor|(?<!masked_)fill_kernel|zero_kernel|memset|set_?zero", MEMORY),
    (r"direct_copy|(bfloat16|float16|float8\w*|half)_copy_kernel|copy_kernel|catarraybatchedcopy|cat_array|copy_device", COPY),
    (r"transpose|permute|contiguous|nchwto|nhwcto|convert_?tensor|tensor_?transform|cast_kernel|cast_transpose", COPY),
    (r"quantiz|quant_|_quant|cast_to_fp8|fp8_cast|dequant|pad_kernel|padding|split_with_sizes|chunk_cat|roll_cuda|flip_", COPY),
    (r"reduce_kernel|reduce_?op|reduction|devicereduce|segmented_?reduce|block_?reduce|_reduce_|reducekernel|cumsum", REDUCTION),
    (r"scan_(inner|outer)|tensor_kernel_scan|welford|amax_kernel|absmax|amax", REDUCTION),
    (r"elementwise|functor|silu|gelu|relu|sigmoid|tanh|pointwise|where_kernel|masked_fill|bias_act|add_bias", ELEMENTWISE),
    (r"unrolled|vectorized|addcmul|binary_?op|unary_?op|pow_tensor|rsqrt|exp_kernel|neg_kernel|clamp|lerp", ELEMENTWISE),
)  # fmt: skip

# Op names without their namespace, the suffix of an autograd node or an in-place underscore: mm, _softmax_backward_data…
OPS: Table = (
    (r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_(coalesced)?$|c10d|nccl|record_param_comms", COMMUNICATION),
    (r"scaled_dot_product|attention|flash_(attn|forward|backward)|fmha|flex_", ATTENTION),
    (r"cross_entropy|nll_?loss|log_?softmax|_loss|^kl_div|^flopwise::scale", LOSS),
    (r"softmax", SOFTMAX),
    (r"layer_?norm|rms_?norm|group_?norm|batch_?norm|instance_norm", NORMALISATION),
    (r"^(b?mm|addb?mm|baddbmm|matmul|linear|t?bmm|mv|addmv|dot|vdot|einsum|_?scaled_(grouped_)?mm|_?grouped_mm|_int_mm)", MATMUL),
    (r"convolution|^conv\d|^_?cudnn_conv|sparse_mm|_mm$|gemm|linear_backward|addmm", MATMUL),
    (r"fused_adam|^adamw$|fused_sgd|fused_adagrad|optimizer\.", OPTIMIZER),
    (r"dropout|bernoulli|^rand|^normal|^uniform|exponential|multinomial|^random", RANDOM),
    (r"embedding|index|gather|scatter|^take|topk|sort|nonzero|unique|masked_select|searchsorted|bincount", INDEX),
    (r"^(copy|_?to_copy|to|clone|contiguous|cat|stack|repeat|flip|roll|constant_pad_nd|_?copy_from)$", COPY),
    (r"^(slice|select|expand|view|transpose|permute|as_strided|unfold|diagonal|split_with_sizes)(_backward|_copy)?$", COPY),
    (r"^(fill|zero|zeros|ones|full|zeros_like|ones_like|full_like|new_zeros|arange|tril|triu|linspace)$", MEMORY),
    (r"foreach_norm|^(sum|mean|max|min|amax|amin|argmax|argmin|norm|linalg_vector_norm|prod)$", REDUCTION),
    (r"^(any|all|var|std|var_mean|cumsum|cumprod|logsumexp|logcumsumexp|count_nonzero|aminmax|_cumsum)$", REDUCTION),
    (r"^_?foreach_copy", COPY),
    (r"^_?foreach|^(add|sub|rsub|mul|div|pow|sqrt|rsqrt|exp|log|neg|abs|where|clamp|sin|cos|tanh|reciprocal)$", ELEMENTWISE),
    (r"^(silu|gelu|relu|sigmoid|softplus|hardswish|elu|leaky_relu|mish|threshold|glu|tanh)(_backward)?$", ELEMENTWISE),
    (r"^(erf|square|maximum|minimum|swiglu|rope|rope_pair|gelu_cuda)(_backward)?$", ELEMENTWISE),
    (r"^(lerp|addcmul|addcdiv|masked_fill|bitwise_\w+|logical_\w+|eq|ne|lt|le|gt|ge|isnan|sign)$", ELEMENTWISE),
)  # fmt: skip


def _compiled(table: Table) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), kind) for pattern, kind in table)


_FUSED_TEMPLATE, _FUSED = _compiled(FUSED_TEMPLATE), _compiled(FUSED)
_FUSED_REDUCTION, _FUSED_POINTWISE = _compiled(FUSED_REDUCTION), _compiled(FUSED_POINTWISE)
_NAMES, _OPS = _compiled(NAMES), _compiled(OPS)
_INDUCTOR = re.compile(r"^triton_(poi|red|per|tem|mm|bmm|for|spl|unk|user|comb)_(?:fused_?)?(.*?)(?:_?\d+)?$")
_OP_PARTS = re.compile(r"^(?:autograd::engine::evaluate_function: )?(?:.*::)?(.*?)(?:backward\d*)?$")
_MANY_TENSORS = re.compile(r"multi_?tensor_?apply|foreach")


@lru_cache(maxsize=1 << 16)
def classify(name: str, op: str = "", phase: str = "") -> str:
    """The class of a kernel: its name decides; else the op above it; else that it ran in the optimizer.

    A kernel over many tensors (`_foreach_*`) is the optimizer's when it ran in that phase, whatever its arithmetic.

    >>> classify("nvjet_sm90_tst_96x128_64x6_2x1_v_bz_NNN")
    'matmul'
    >>> classify("my_kernel", "aten::mm")
    'matmul'
    >>> classify("triton_poi_fused__to_copy_t_5")
    'copy/cast'
    """
    text, op = name[:LONGEST_MATCHED].lower(), op[:LONGEST_MATCHED]
    if phase == OPTIMIZER and _MANY_TENSORS.search(text):
        return OPTIMIZER
    found = _by_name(text) or (_by_op(op.lower()) if op else None)
    if found is None:
        return OPTIMIZER if phase == OPTIMIZER else OTHER
    return found


def _by_name(text: str) -> str | None:
    inductor = _INDUCTOR.match(text)
    if inductor is None:
        return _first(_NAMES, text)
    heuristic, fused = inductor.groups()
    if heuristic in ("tem", "mm", "bmm"):
        return _first(_FUSED_TEMPLATE, fused)
    last = _FUSED_REDUCTION if heuristic in ("red", "per", "spl") else _FUSED_POINTWISE
    return _first(_FUSED, fused) or _first(last, fused)


def _by_op(text: str) -> str | None:
    parts = _OP_PARTS.match(text)
    return _first(_OPS, (parts.group(1) if parts else text).rstrip("_")) or _first(_OPS, text)


def _first(table: tuple[tuple[re.Pattern[str], str], ...], text: str) -> str | None:
    return next((kind for pattern, kind in table if pattern.search(text)), None)
