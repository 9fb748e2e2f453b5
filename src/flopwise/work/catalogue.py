"""The one catalogue of operations, by aten's name: the class, the bytes, the FLOPs, and the launches in eager PyTorch.

Asked by the dry run (tensors of torch reduced to shapes and dtypes), by the analysis of traces (what the profiler recorded
of an op's inputs), by the shape simulator, and by the classifier of kernels where a kernel's own name does not say.
A name that is not here has the class of what it is made from: `x_` and `_foreach_x` that of `x`, `x_backward` too.

To add an op: its name under its class; a rule of `op_rules` where it does not simply read every input and write every
result once; its launches where they are not one.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from flopwise.work import op_rules as rules
from flopwise.work.kernel_names import class_by_default, class_of_name
from flopwise.work.op_rules import Args, FlopsRule, LaunchRule, Moved, MovedRule, Tensors
from flopwise.work.operation import (
    ATTENTION,
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


class Op(msgspec.Struct, frozen=True):
    """What is known of an operation whatever its tensors are."""

    kind: str  # its class
    launches: int | LaunchRule = 1
    moved: MovedRule | None = None  # None: every input is read once, every result written once
    unread: tuple[int, ...] = ()  # arguments that are given for their shape, or to be overwritten
    flops: FlopsRule | None = None
    begins_with: str = ""  # 'clone' or 'zeros': the first of its launches, which a trace shows as an op of its own
    over_lists: bool = False  # foreach, fused optimizers


VIEWS = """
    _autocast_to_full_precision _autocast_to_reduced_precision _conj _fw_primal _indices _make_dual _neg_view
    _nested_get_values _nested_view_from_buffer _nested_view_from_jagged _reshape_alias _sparse_broadcast_to
    _test_autograd_multiple_dispatch_view _unsafe_view _values adjoint alias as_strided broadcast_to ccol_indices chunk
    coalesce col_indices conj crow_indices detach diagonal dsplit expand expand_as flatten hsplit imag indices lift
    lift_fresh linalg_diagonal mH mT matrix_H moveaxis movedim narrow numpy_T permute pin_memory positive ravel real
    record_stream reshape reshape_as resize resolve_conj resolve_neg row_indices select set slice slice_inverse split
    split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsqueeze values view
    view_as view_as_complex view_as_real vsplit
"""
_ALLOCATIONS = """
    empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided
"""
# Choices that could have been otherwise: a log-softmax is 'loss', since language models compute it for the cross-entropy and
# hardly anywhere else; 'copy/cast' changes place, layout or type; 'memory' fills with what no tensor holds.
_CLASSES = {
    MATMUL: """
        _addmm_activation _convolution _convolution_double_backward _convolution_mode _cslt_sparse_mm
        _cslt_sparse_mm_search _grouped_mm _int_mm _scaled_grouped_mm _scaled_grouped_mm_v2 _scaled_mm _scaled_mm_v2
        _slow_conv2d_forward _sparse_addmm _sparse_mm _sparse_mm_reduce_impl _sparse_semi_structured_addmm
        _sparse_semi_structured_linear _sparse_semi_structured_mm _weight_int4pack_mm _weight_int8pack_mm addbmm addmm
        addmv baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d conv_depthwise3d conv_tbc conv_transpose1d
        conv_transpose2d conv_transpose3d convolution convolution_overrideable cudnn_convolution
        cudnn_convolution_add_relu cudnn_convolution_relu cudnn_convolution_transpose dot einsum
        fbgemm_linear_fp16_weight fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
        fbgemm_linear_int8_weight_fp32_activation fp8_gated_linear fp8_linear fp8_matmul
        inner linalg_multi_dot linear matmul miopen_convolution
        miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose miopen_depthwise_convolution
        mkldnn_convolution mkldnn_linear mm mv slow_conv3d slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d
        slow_conv_transpose3d sparse_sampled_addmm sspaddmm tensordot thnn_conv2d vdot
    """,
    ATTENTION: """
        _cudnn_attention_backward _cudnn_attention_forward _efficient_attention_backward _efficient_attention_forward
        _flash_attention_backward _flash_attention_forward _flash_attn_backward _flash_attn_forward
        _native_multi_head_attention _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _triton_multi_head_attention flash_backward flash_forward
        flex_attention scaled_dot_product_attention sdpa_cudnn sdpa_efficient sdpa_flash sdpa_flex sdpa_triton
    """,
    SOFTMAX: "_masked_softmax _safe_softmax _softmax _softmax_backward_data softmax",
    LOSS: """
        _ctc_loss _cudnn_ctc_loss _log_softmax _log_softmax_backward_data binary_cross_entropy
        binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy cross_entropy_loss cross_entropy_rows ctc_loss
        hinge_embedding_loss huber_loss kl_div l1_loss linear_cross_entropy log_softmax margin_ranking_loss mse_loss
        multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d nll_loss2d_forward
        nll_loss_forward nll_loss_nd poisson_nll_loss scale smooth_l1_loss soft_margin_loss triplet_margin_loss
    """,
    NORMALISATION: """
        _batch_norm_impl_index _batch_norm_no_update _batch_norm_with_update _fused_rms_norm _native_batch_norm_legit
        _native_batch_norm_legit_functional _native_batch_norm_legit_no_training add_rms_norm batch_norm
        batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
        batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats cudnn_batch_norm group_norm
        instance_norm layer_norm layer_norm_weights miopen_batch_norm native_batch_norm native_group_norm
        native_layer_norm rms_norm rms_norm_cast rms_norm_weights
    """,
    ELEMENTWISE: """
        __ilshift__ __ixor__ __lshift__ __rshift__ __xor__ _amp_foreach_non_finite_check_and_unscale _amp_update_scale
        _conj_physical _prelu_kernel abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and
        bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip
        conj_physical copysign cos cosh deg2rad digamma div elu eq equal erf erfc erfinv exp exp2 expm1 float_power floor
        floor_divide fmax fmin fmod frac frexp gcd ge gelu gelu_cuda glu greater gt hardshrink hardsigmoid hardswish
        hardtanh heaviside hypot i0 igamma igammac infinitely_differentiable_gelu isclose isfinite isinf isnan isneginf
        isposinf lcm ldexp le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and
        logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply mvlgamma nan_to_num
        native_dropout_backward ne neg nextafter polygamma pow prelu rad2deg reciprocal relu relu6 remainder rope
        rope_pair round rrelu rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
        sqrt square sub subtract joined_swiglu_gradient swiglu swiglu_cast tan tanh threshold true_divide trunc where xlogy
    """,
    REDUCTION: """
        _aminmax _cummax_helper _cummin_helper _cumsum _logcumsumexp all amax amin aminmax any argmax argmin count_nonzero
        cummax cummin cumprod cumsum fp8_amax linalg__powsum linalg_norm linalg_vector_norm logcumsumexp logsumexp max mean median
        min nanmean nanmedian nansum norm prod std std_mean sum trace var var_mean
    """,
    COPY: f"""
        {VIEWS}
        _chunk_cat _copy_from _to_copy block_diag cat clone column_stack concat concatenate constant_pad_nd contiguous
        copy diagonal_scatter dstack flip fp8_cast fliplr flipud hstack lift_fresh_copy pad pixel_shuffle pixel_unshuffle
        reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d
        replication_pad3d roll rot90 select_scatter slice_scatter stack as_strided_scatter tile to vstack
    """,
    OPTIMIZER: "_fused_adagrad _fused_adam _fused_adamw _fused_sgd adamw",
    INDEX: """
        _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
        _embedding_bag_per_sample_weights_backward _index_put_impl _unique _unique2 _unsafe_index _unsafe_index_put
        argsort bincount bucketize embedding embedding_bag embedding_dense_backward embedding_renorm gather histc index
        index_add index_copy index_fill index_put index_reduce index_select kthvalue masked_scatter masked_select mode
        msort nonzero nonzero_static put scatter scatter_add scatter_reduce searchsorted sort take take_along_dim topk
        unique_consecutive unique_dim
    """,
    MEMORY: f"""
        {_ALLOCATIONS}
        _local_scalar_dense arange eye fill full full_like linspace logspace new_full new_ones new_zeros ones
        ones_like range scalar_tensor tril tril_indices triu triu_indices zero zeros zeros_like
    """,
    RANDOM: """
        _fill_mem_eff_dropout_mask _fused_dropout _sample_dirichlet _standard_gamma alpha_dropout bernoulli binomial cauchy
        dropout exponential feature_alpha_dropout feature_dropout geometric log_normal multinomial native_dropout normal
        normal_functional poisson rand rand_like randint randint_like randn randn_like random randperm rrelu_with_noise
        rrelu_with_noise_functional uniform
    """,
}
_MOVED: dict[MovedRule, str] = {
    rules.nothing: f"{VIEWS} {_ALLOCATIONS}",
    rules.gathers: "embedding gather index index_select take",
    rules.picks: "nll_loss nll_loss_forward",
    rules.scatter: "scatter_ scatter_reduce_",
    rules.scatter_add: "scatter_add_",
    rules.index_copy: "index_copy_",
    rules.index_add: "index_add_ index_reduce_",
    rules.index_fill: "index_fill_",
    rules.index_put: "index_put_ _index_put_impl_",
    lambda args, inputs, outputs: (4, 0): "scale",  # flopwise's own: by one, as without loss scaling, it moves nothing
}
_UNREAD = {  # places of arguments
    (0,): """
        _foreach_copy_ bernoulli_ copy_ exponential_ fill fill_ full_like new_full new_ones new_zeros normal_ ones_like
        rand_like randint_like randn_like random_ uniform_ zero zero_ zeros_like
    """,
    (0, 3, 4, 5, 8, 9): "fp8_linear fp8_gated_linear",  # what their backward passes keep
    (1,): "nll_loss_backward",  # of the log probabilities it takes the shape
    (6,): "native_layer_norm_backward",  # so it does of the bias
}
# Fused attention, by whether it is a backward pass and whether its inputs are [batch, heads, tokens, width]; else heads and
# tokens are the other way round.
_BACKENDS = [f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")]
_BACKENDS += ["_scaled_dot_product_flash_attention_for_cpu"]
_BACKENDS += [f"sdpa_{name}" for name in ("flash", "efficient", "cudnn", "flex", "triton")]  # the shape simulator's
_ATTENTION = {
    (False, True): f"{' '.join(_BACKENDS)} _cudnn_attention_forward flash_forward",
    (True, True): f"{'_backward '.join(_BACKENDS)}_backward _cudnn_attention_backward flash_backward",
    (False, False): "_flash_attention_forward _efficient_attention_forward _flash_attn_forward",
    (True, False): "_flash_attention_backward _efficient_attention_backward _flash_attn_backward",
}
# flopwise's own products: the places of [m, k] and [n, k] in fp8.
TRANSPOSED = {"fp8_matmul": (0, 2), "fp8_linear": (1, 6), "fp8_gated_linear": (1, 6)}
_FLOPS: dict[FlopsRule, str] = {
    rules.matmul(0): "mm bmm _int_mm _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2",
    rules.matmul(1): "addmm baddbmm addbmm _addmm_activation",
    rules.vector(0): "mv dot vdot",
    rules.vector(1): "addmv",
    **{rules.transposed(*places): name for name, places in TRANSPOSED.items()},
    **{rules.attention_rule(*layout): names for layout, names in _ATTENTION.items()},
}
_LAUNCHES: dict[int | LaunchRule, str] = {
    0: f"{VIEWS} {_ALLOCATIONS} _local_scalar_dense",  # the last is a copy to the host
    2: """
        native_layer_norm_backward layer_norm_backward _fused_rms_norm_backward rms_norm_backward sdpa_flex_backward
        gather_backward index_add index_put index_select_backward masked_fill nll_loss2d_backward nll_loss_backward scatter
        scatter_add select_backward slice_backward
    """,
    # row sums, the kernel (or dK with dV, and dQ), dQ to its dtype; cuDNN fills dQ with zeros before
    3: "_scaled_dot_product_flash_attention_backward sdpa_flash_backward flash_backward sdpa_triton_backward",
    4: "_scaled_dot_product_cudnn_attention_backward sdpa_cudnn_backward",
    5: "sort",
    9: "logsumexp",
    16: "multinomial",
    22: "topk",
    rules.embedding_backward: "embedding_dense_backward embedding_backward",
    rules.cat: "cat",
    rules.efficient_backward: "_scaled_dot_product_efficient_attention_backward sdpa_efficient_backward",
}
_BEGINS_WITH = {
    "clone": "index_add index_put masked_fill scatter scatter_add",
    "zeros": """
        embedding_backward embedding_dense_backward gather_backward index_select_backward nll_loss2d_backward
        nll_loss_backward select_backward slice_backward
    """,
}


def _by_name(table: dict[Any, str]) -> dict[str, Any]:
    return {name: value for value, names in table.items() for name in names.split()}


_KIND_OF: dict[str, str] = _by_name(_CLASSES)
_MOVED_OF: dict[str, MovedRule] = _by_name(_MOVED)
_FLOPS_OF: dict[str, FlopsRule] = _by_name(_FLOPS)
_LAUNCHES_OF: dict[str, int | LaunchRule] = _by_name(_LAUNCHES)
_BEGINS_OF: dict[str, str] = _by_name(_BEGINS_WITH)
ATTENTION_LAYOUT: dict[str, tuple[bool, bool]] = _by_name(_ATTENTION)
_UNREAD_OF: dict[str, tuple[int, ...]] = _by_name(_UNREAD)
NAMES = frozenset(_KIND_OF) | frozenset(_MOVED_OF) | frozenset(_FLOPS_OF) | frozenset(_LAUNCHES_OF)
_SQUASHED = {name.replace("_", "").lower(): kind for name, kind in _KIND_OF.items()}
_ENDINGS = ("_backward_data", "_double_backward", "_backward", "_forward")
_LISTS = (
    "_foreach_",
    "_fused_adam",
    "_fused_sgd",
    "_fused_adagrad",
    "_amp_foreach",
    "foreach_",
    "fused_adam",
    "unscale_",
)
_OWN_ADAMW, _OWN_ADAMW_LAUNCHES = "adamw_", 2  # coefficients, update; it finds all tensors through one table


def known_kind(name: str) -> str | None:
    """The class of an op by its name, without namespace; None where neither it nor what it is made from is known.

    >>> known_kind("_foreach_norm"), known_kind("gelu_backward"), known_kind("my_op")
    ('reduction', 'elementwise', None)
    """
    if (kind := _KIND_OF.get(name) or _KIND_OF.get(name.removesuffix("_"))) is not None:
        return kind
    name = name.removesuffix("_")
    if name.startswith("_foreach_"):
        return known_kind(name.removeprefix("_foreach_")) or ELEMENTWISE
    if name.startswith("special_"):
        return known_kind(name.removeprefix("special_")) or ELEMENTWISE
    if name.endswith("_copy"):
        return COPY
    ending = next((one for one in _ENDINGS if name.endswith(one)), "")
    return known_kind(name.removesuffix(ending)) if ending and name != ending else None


def kind_of_node(name: str) -> str | None:
    """The class of an autograd node by its name: `NativeLayerNorm` of `NativeLayerNormBackward0`."""
    return _SQUASHED.get(name.lower())


@lru_cache(maxsize=4096)
def operation(name: str) -> Op:
    """What is known of an op; its class is 'other' where nothing is.

    >>> operation("aten::add_").kind, operation("flopwise::rms_norm_backward").launches, operation("aten::view").launches
    ('elementwise', 2, 0)
    """
    bare = name.rpartition("::")[2]
    base = bare.removesuffix("_")
    launches, begins_with = _LAUNCHES_OF.get(bare, _LAUNCHES_OF.get(base, 1)), _BEGINS_OF.get(base, "")
    if base != bare and begins_with and isinstance(launches, int):
        launches, begins_with = launches - 1, ""  # in place there is nothing to copy first
    return Op(
        kind=known_kind(bare) or class_of_name(name) or class_by_default(name) or OTHER,
        launches=launches,
        moved=_MOVED_OF.get(bare) or _MOVED_OF.get(base),
        flops=_FLOPS_OF.get(bare) or _FLOPS_OF.get(base),
        unread=_UNREAD_OF.get(bare, ()),
        begins_with=begins_with,
        over_lists=bare.startswith(_LISTS) or bare == _OWN_ADAMW,
    )


def copies_first(name: str) -> bool:
    """Whether an op copies its first argument, and then changes the copy in place.

    >>> copies_first("masked_fill"), copies_first("masked_fill_")
    (True, False)
    """
    return _BEGINS_OF.get(name) == "clone"


def read_inputs(op: Op, args: Args, inputs: Tensors) -> Tensors:
    """The tensors that a call reads."""
    if not op.unread:
        return inputs
    unread = [args[place] for place in op.unread if place < len(args)]
    return [tensor for tensor in inputs if not any(tensor is one for one in unread)]


def moved_bytes(op: Op, args: Args, inputs: Tensors, outputs: Tensors) -> Moved:
    """Bytes read and written by one call. `inputs`: the tensors among the arguments, each once where that is known."""
    if op.moved is not None:
        return op.moved(args, inputs, outputs)
    read = read_inputs(op, args, inputs) if op.unread else inputs
    return sum([tensor.n_bytes for tensor in read]), sum([tensor.n_bytes for tensor in outputs])


def flops(op: Op, args: Args) -> int:
    """FLOPs of one call; 0 where it multiplies no matrices.

    >>> from flopwise.work.tensor import TensorMeta
    >>> flops(operation("mm"), [TensorMeta((4, 8), "bf16"), TensorMeta((8, 16), "bf16")])
    1024
    """
    return (op.flops(args) or 0) if op.flops else 0


def launches(op: Op, args: Args) -> int:
    """Kernels of one call, the copies and fills that do its work among them."""
    return op.launches if isinstance(op.launches, int) else op.launches(args)


def work_of_call(op: Op, args: Args, inputs: Tensors, outputs: Tensors) -> tuple[int, int, int, int]:
    """FLOPs, bytes read, bytes written and launches of one call."""
    count = (op.flops(args) or 0) if op.flops else 0
    kernels = op.launches if isinstance(op.launches, int) else op.launches(args)
    if op.moved is None and not op.unread:  # most are so
        read, written = sum([one.n_bytes for one in inputs]), sum([one.n_bytes for one in outputs])
    else:
        read, written = moved_bytes(op, args, inputs, outputs)
    return count, read, written, kernels


def launches_over(name: str, elements: Sequence[int], lists: int) -> int:
    """Launches of an op over lists of tensors of these sizes."""
    own = name.rpartition("::")[2] == _OWN_ADAMW
    return _OWN_ADAMW_LAUNCHES if own else rules.list_launches(elements, lists)
