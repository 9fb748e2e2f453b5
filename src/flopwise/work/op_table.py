"""What is known of an aten op from its name: its class, and how many kernels eager PyTorch launches for it on a GPU."""

import re
from collections.abc import Sequence
from functools import lru_cache

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

# Read from top to bottom; the first that matches decides. The choices are the trace readers' (a log-softmax is 'loss').
_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"all_?reduce|all_?gather|reduce_scatter|all_to_all|broadcast_$|wait_tensor", COMMUNICATION),
        (r"scaled_dot_product|attention|flex_|^flash_(forward|backward)$", ATTENTION),
        (r"nll_loss|log_softmax|_loss|^kl_div|cross_entropy|^scale$", LOSS),
        (r"softmax", SOFTMAX),
        (r"layer_norm|rms_norm|group_norm|batch_norm", NORMALISATION),
        (r"^(b?mm|addb?mm|baddbmm|mv|addmv|dot|vdot|_scaled_mm|_grouped_mm|_scaled_grouped_mm|_int_mm)$", MATMUL),
        (r"convolution", MATMUL),
        (r"^_fused_(adam|adamw|sgd|adagrad)$|^adamw$", OPTIMIZER),
        (r"dropout|bernoulli|^rand|^normal|^uniform|exponential|multinomial|^random", RANDOM),
        (r"embedding|index|gather|scatter|^take|topk|sort|nonzero|unique|masked_select|searchsorted|bincount", INDEX),
        (r"^(detach|alias|_unsafe_view|_reshape_alias|lift|lift_fresh|set)$", COPY),  # nothing runs
        (r"^(copy|_to_copy|clone|cat|stack|repeat|flip|roll|constant_pad_nd|_foreach_copy|lift_fresh_copy)$", COPY),
        (r"^(slice|select|diagonal|unfold|as_strided)_(backward|scatter|copy)$|_copy$", COPY),
        (r"^(fill|zero|zeros|ones|full|zeros_like|ones_like|full_like|arange|tril|triu|linspace|eye)$", MEMORY),
        (r"^(new_zeros|new_ones|new_full|scalar_tensor|_foreach_zero)$|empty", MEMORY),
        (r"^(sum|mean|max|min|amax|amin|argmax|argmin|norm|linalg_vector_norm|prod|_foreach_norm)$", REDUCTION),
        (r"^(any|all|var|std|var_mean|cumsum|cumprod|logsumexp|count_nonzero|aminmax|bucketize)$", REDUCTION),
        (r"^_amp_|^(gelu|gelu_cuda|swiglu|rope|rope_pair)$", ELEMENTWISE),
    )
)


@lru_cache(maxsize=4096)
def kind_of(name: str, pointwise: bool = False) -> str:
    """The class of an op named without namespace and overload; `pointwise`: torch itself says it is.

    >>> kind_of("mm"), kind_of("_softmax_backward_data"), kind_of("exp", pointwise=True)
    ('matmul', 'softmax', 'elementwise')
    """
    bare = name.rstrip("_")
    for pattern, kind in _KINDS:
        if pattern.search(bare):
            return kind
    return ELEMENTWISE if pointwise or bare.startswith("_foreach_") or bare.endswith("_backward") else OTHER


# Launches of an op that are not one. Read from aten/src/ATen/native/cuda of torch 2.11.
_LAUNCHES = {
    "masked_fill": 2,  # a copy, then the filling in place
    "nll_loss_backward": 2,  # zeros, then the one element of each row
    "nll_loss2d_backward": 2,
    "slice_backward": 2,  # zeros, then a copy into the slice
    "select_backward": 2,
    "index_select_backward": 2,
    "gather_backward": 2,
    "scatter": 2,  # out of place: a copy first
    "scatter_add": 2,
    "index_put": 2,
    "index_add": 2,
    "tril": 1,
    "native_layer_norm_backward": 2,  # the input's gradient; the weight's and the bias's
    "_fused_rms_norm_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,  # row sums, the kernel, dq to its dtype
    "_scaled_dot_product_cudnn_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,  # row sums, the kernel
    "flash_backward": 3,  # row sums, dK and dV, dQ
    "rms_norm_backward": 2,  # the input's gradient with partial sums of the weight's, and their sum
    "linalg_vector_norm": 1,
    "_amp_update_scale_": 1,
    "sort": 4,  # a segmented radix sort, with its offsets and indices
    "topk": 2,
    "multinomial": 4,
    "_local_scalar_dense": 0,  # a copy to the host, not a kernel
}
_NOTHING_RUNS = re.compile(
    r"^(empty|empty_like|empty_strided|new_empty|new_empty_strided|detach|_unsafe_view|lift|lift_fresh|"
    r"_reshape_alias|resolve_conj|resolve_neg|set|resize|alias|record_stream)_?$"
)
_SORTED_INDICES = 3072  # embedding_dense_backward: with more indices than this, they are sorted first
_SORTED_LAUNCHES = 9
_CAT_INPUTS = 128  # of one launch


def launches(name: str, view: bool, numel: int, inputs: int = 1) -> int:
    """Kernels that one call launches: `numel` elements of its last input, `inputs` tensors in its list, if it has one.

    >>> launches("mm", False, 64), launches("transpose", True, 64), launches("masked_fill", False, 64)
    (1, 0, 2)
    """
    if view or _NOTHING_RUNS.match(name):
        return 0
    if name == "embedding_dense_backward":
        return 2 if numel <= _SORTED_INDICES else _SORTED_LAUNCHES
    if name == "cat":
        return -(-inputs // _CAT_INPUTS)
    return _LAUNCHES.get(name, 1)


# multi_tensor_apply (aten/src/ATen/native/cuda/MultiTensorApply.cuh): a launch takes so many tensors of each list, by the
# number of lists, and so many chunks of 65,536 elements in all.
_CHUNK_ELEMENTS = 65_536
_TENSORS_OF_A_LAUNCH = (110, 64, 48, 36, 30)
_CHUNKS_OF_A_LAUNCH = 320


OWN_ADAMW = "adamw_"
_OWN_ADAMW_LAUNCHES = 2  # coefficients, update


def launches_over(name: str, elements: Sequence[int], lists: int) -> int:
    """Launches of an op over lists of tensors: flopwise's own AdamW finds all of them through one table."""
    return _OWN_ADAMW_LAUNCHES if name.removeprefix("flopwise::") == OWN_ADAMW else chunked_launches(elements, lists)


def chunked_launches(elements: Sequence[int], lists: int) -> int:
    """Launches of one op over `lists` lists of tensors, each list with tensors of these sizes.

    >>> chunked_launches([10] * 111, lists=1), chunked_launches([65_536 * 320 + 1], lists=4)
    (2, 2)
    """
    most = _TENSORS_OF_A_LAUNCH[min(max(lists, 1), len(_TENSORS_OF_A_LAUNCH)) - 1]
    done, tensors, chunks = 0, 0, 0
    for size in elements:
        left = -(-size // _CHUNK_ELEMENTS)
        tensors += 1 if left else 0
        while left:
            taken = min(left, _CHUNKS_OF_A_LAUNCH - chunks)
            left, chunks = left - taken, chunks + taken
            if chunks == _CHUNKS_OF_A_LAUNCH or (tensors == most and not left):
                done, chunks = done + 1, 0
                tensors = 1 if left else 0  # the tensor that is cut goes on in the next launch
    return done + (1 if chunks else 0)
