"""Words in the names of kernels, and what class of work they tell: from V100 to B200, from MI210 to MI355X.

A table is read from top to bottom; the first row with a word in the name decides. Names are lower-case, and any number in them
is written 0. `kernel_classes.tsv`, beside the tests, holds names of every library, each with its class and the reason. Choices
that could have been otherwise:
- a convolution is 'matmul', with the helpers of its library; so is a product with an epilogue, whatever the epilogue does;
- a log-softmax is 'loss': language models compute it for the cross-entropy and hardly anywhere else;
- linear attention and state-space scans are 'attention';
- 'copy/cast' changes place, layout or type, quantisation included; 'memory' fills with a constant, or crosses between host
  and device;
- 'embedding/index' is whatever moves or counts by index: tables, routing of tokens to experts, the key-value cache, sorting;
- pooling is 'reduction', sampling of tokens is 'random';
- a fused kernel has the class of its most telling part: RMSNorm with a cast and a residual add is 'normalisation'.
"""

import re
from functools import cache, lru_cache

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
LONGEST_WORD = 200  # characters of one name that are looked at

_STORES = r"(and|gather|copy|store|write|set|update|append|concat|swap|quant|load|move)\w*"

# What the name of a function, or of a functor among its template arguments, tells.
WORDS: Table = (
    # who is who among names that contain each other's words
    (INDEX, r"split_embedding embedding_(codegen|backward|bag) batched_embedding advance_step"),
    (ELEMENTWISE, r"silu_(and_)?mul\w*(quant|cvt) (swiglu|geglu|gelu_and_mul)_\w*(quant|cast)"),
    (ATTENTION, r"gemm_softmax_gemm"),
    (COPY, r"dequant_mm_ quantize_mm repack preshuffle_(weight|kernel) permute_cols"),
    (MATMUL, r"gemm\w*(all_?reduce|reduce_?scatter|all_?gather) all_?gather\w*gemm (^|_)ag_gemm gemm_(rs|ar)(_|$)"),
    (REDUCTION, r"lp_?(norm|max)functor l0_?norm_?functor multi_?tensor_?l0_?norm foreach_(norm|max(?!imum))"),
    (
        COMMUNICATION,
        r"""nccl rccl msccl nvshmem multimem userbuffers deep_?ep lamport cross_device symm_?mem quick_?reduce
        (?<!sm)all_?reduce all_?gather reduce_?scatter all_?to_?all a0a_?(v|dispatch|combine|prepare|sanitize) c10d
        wait_tensor record_param_comms send_?recv sendrecv (^|_|moe)ep_?dispatch (^|_|moe)ep_?combine internode intranode
        notify_(dispatch|combine) low_latency_(dispatch|combine) halo barrier (put|wait|get)_signal signal_(wait|put)
        peer_?(copy|mem)""",
    ),
    (
        OPTIMIZER,
        r"""fused_?adam fused_?sgd fused_?adagrad fused_?lamb fusedoptimizer
        adam_?w?_(kernel|cuda|step|update|norm|prepare) adam\w*functor adamcapturable lamb(stage|functor) novograd
        k?optimizer(static|0state|kernel) kernel_?optimizer koptimizer kprecondition lion_(kernel|update) sgd\w*functor
        adagrad\w*functor (adam|lion|lamb|sgd|rmsprop)\w*0bit""",
    ),
    (
        LOSS,
        r"""cross_?entropy nll_?loss log_?soft_?max xentropy (^|_)xent _loss(_|$) loss_(kernel|fwd|bwd|forward|backward)
        (^|_)mse_ smooth_l0 huber kl_?div (^|_)jsd ctc_(loss|alpha|beta) binary_cross focal tv_distance""",
    ),
    (
        NORMALISATION,
        r"""rms_?norm layer_?norm group_?norm batch_?norm instance_?norm weight_?norm (qk?|k)_?norm(_|$|warp|rope|kernel)
        add_norm (^|_)ln_(fwd|bwd) norm_(fwd|bwd|forward|backward) l0_?norm_(fwd|bwd) fused_rms_ rowwise_?moments
        gammabeta computegradgamma computeinternalgradients cuapplylayer cuapplyrms cuda_?apply_?layer
        cucompute(part)?grad welford bn_(fw|bw)_ computefusedparams compute_gi_kernel (^|_)dyt_""",
    ),
    (RANDOM, r"(?<!up)(?<!down)sampling"),
    (INDEX, r"topk top_k grouped_topk topkgating gating_?softmax fused_gate"),  # before the softmax in them
    (ELEMENTWISE, r"rotary (?<![a-z])rope rope_ rope(quantize|kernel|and) applyrope kn_entry_0c"),
    (
        INDEX,
        rf"""{_STORES}kv_?cache {_STORES}kv_?buffer {_STORES}_cache(_|$) append_?paged
        kv_?cache_(copy|write|scatter|update|gather) kv_?indices""",
    ),
    # fused attention of every generation, and the kernels around it; linear attention and state-space models
    (
        ATTENTION,
        r"""flash_?(fwd|bwd|attn|attention|fprop|bprop|forward|backward|prepare|delta|dkdv|dq|mla|splitkv|decod|prefill)
        fmha sdpa
        flex_(attention|decoding) attention (?<![a-z])attn attn(_|$|fwd|bwd) paged_?att (^|_)mha_ kernel_mha mmha xqa
        multi_?head mla_(fwd|bwd|dec|prefill|a0w0|reduce|metadata|stage|combine|paged|kernel) mlapag
        mla_?(kernel|reduction) (prefill|decode)with (prefill|decode)_kernel merge_?(attn_)?state lengthmerge mqa_logits
        clean_logits (^|_)pa_(fwd|bf0|fp0|a0w0|decode|mqa|ragged|persistent|kernel|ps|reduce) unified_att scaled_?dot
        dot_do_o convert_dq bwd_(kernel_)?(dk_?dv|dq|preprocess|fuse) batchprefill batchdecode single(prefill|decode)
        varlen_num_blocks lightning_index qk_int0_sv chunk_(scan|state|gated|fwd|bwd|kda|gla|delta|local_cumsum)
        (^|_)chunk_(o|h)(_|$) state_passing selective_(scan|state) (^|_)ssd_ (^|_)ssm_ delta_rule
        recurrent_(gla|gated|delta|kda|fwd|bwd) retention (^|_|r)wkv recompute_w_u prepare_wy solve_tril""",
    ),
    # cuBLAS, cuBLASLt, CUTLASS, cuDNN's convolutions, Tensile, Composable Kernel, AITER, Triton, quantised products
    (
        MATMUL,
        r"""nvjet split_?k_?reduc reduce_?split_?k wv_?split_?k cublas (?<!fb)gemm gemv gemk0 (^|_)cijk_ wgrad dgrad fprop
        implicit_con xmma winograd convol conv0d asmconv convuni (^|_)conv_ _conv(_|$)
        conv_(fwd|bwd|wrw|depthwise|transpose) scudnn [a-z]0cudnn cudnn\w*conv (^|_)bmm_ (^|_)b?mm_kernel ^bmm$ matmul
        matvec mul_mat sparse_mm ^triton_(b?mm|addmm) addmm _mm$ (^|_)dot_kernel reduce_0block_kernel magma\w*mm
        fused_?moe fmoe moe_(gemm|stage|mm|mx|wna0) marlin machete hipblaslt tensile flatmm wna0 a0w0 w0a0 f0f0bf0
        bf0bf0bf0 f0i0bf0 (^|_)t?gmm(_|$) kernel_grouped sgmv bgmv lora_(shrink|expand) trsm syrk trmm potrf getrf geqrf
        syevj gesvd spmm sddmm csrm[mv] persistrnn rnn_(block|persist) (^|_)q?linear(_|$) computestrides ^rocblas_dot
        hadamard""",
    ),
    (SOFTMAX, r"soft_?max"),
    (REDUCTION, r"(max|avg|average|adaptive|fractional)\w*pool pool0d pooling mlopool"),
    (ELEMENTWISE, r"upsample interpolat"),
    (
        RANDOM,
        r"""curand distribution_ bernoulli dropout (^|_)random_ randperm exponential_kernel multinomial gumbel philox
        (?<!down)(?<!grid_)sample (^|_)rand(n|int)?_ (uniform|normal|cauchy|geometric|poisson)_kernel""",
    ),
    (
        MEMORY,
        r"""tril_triu tril_kernel triu arange ^range_cuda linspace elementwise_kernel_with_index memset
        fill_?(functor|buffer|value) (?<!masked_)fill_kernel (^|_)zero_kernel set_?zero foreach_zero subtensoropwithscalar
        ^zeros?$""",
    ),
    # moving by index, routing, counting and sorting
    (
        INDEX,
        r"""embedding pooled_emb embs_ index indic(e|ing) gather scatter take_put masked_(select|scatter) top_?p_
        sort(?!ed_) bitonic radix unique bykey by_key copy_if histogram bincount nonzero searchsorted bucketize compact
        device(select|partition|merge|runlength) krn_partial compute_num_of_partial compute_grad_weight
        moe_(align|sum|permute) unpermute ^_?permute_kernel$ permute_0d_(data|lengths)
        permute_(indices|sparse|with_mask|multi) sort_chunks routing expert expt_ gating finalize_?moe moe_?finalize
        finalizekernel expandinput token_ids? position(s|_|$) slot_?mapping req_to_token seq_?lens? block_?table bitmatrix
        lookup jagged sparse_(data|feature) offsets_range lengths_range bounds_check linearize long_segments
        roi_?(align|pool) (^|_)nms grid_?sampl deform get_rows last_loc alloc_(extend|decode) count_and build_tree
        verify_?tree prepare_inputs writeback_idx""",
    ),
    (
        COPY,
        r"""direct_copy copy_(kernel|device|cuda|functor|blocks) _copy(_|$) ^copy$ copyfunctor copykernel cat_?array
        transpose permute contiguous nchw0?(to)?nhwc nhwc0?(to)?nchw convert tensor_?transform
        cast_(kernel|transpose|gated|mx|to) (^|_)cast_ fp0_cast quantiz quant(_|$|er|kernel) dequant (^|_)cvt_ (^|_)cpy_
        pad_(kernel|fwd|bwd|nd) padding split_with_sizes chunk_cat roll_cuda flip_ im0col im0d0col col0im vol0col
        pixel_(un)?shuffle swizzle concat_ _concat interleave remove_pad subtensoropwith(cast|sub)tensor qparam
        (fp0|bf0|half|rowwise)_to_float to_(half|bf0|fp0|hfp0|mx) float_to""",
    ),
    (
        REDUCTION,
        r"""reduce_(kernel|op) reduceop devicereduce devicesegmentedreduce reduction segmented_?(max_)?reduc block_?reduce
        reducekernel _reduce(_|$) cum(sum|prod) tensor_kernel_scan scan_(inner|outer) (^|_)amax absmax argm(ax|in)
        sum_rows (^|_)sum_kernel logsumexp mean_kernel""",
    ),
    (
        ELEMENTWISE,
        r"swiglu geglu dswiglu silu_?(and_)?mul gelu_?(and_)?mul act_?and_?mul gated_?act activation element_mul",
    ),
)

# What a generic function does when neither its template arguments nor its op say: its loop, or what it is most often.
DEFAULTS: Table = (
    (REDUCTION, r"scan reduce (^|_)sum(_|$) (^|_)mean(_|$)"),
    (
        ELEMENTWISE,
        r"""elementwise pointwise functor silu gelu relu sigmoid tanh where_kernel masked_fill bias unrolled vectorized
        multi_?tensor foreach addcmul binary_?op unary_?op optensor op0dtensor neuronfwd pow_tensor rsqrt exp_kernel
        neg_kernel clamp lerp parallel_for transform activation unary binary (^|_)add(_|$) (^|_)mul(_|$) (^|_)sub(_|$)
        (^|_)div(_|$) (^|_)scale(_|$) (^|_)scal(_|$) (^|_)axpy (^|_)sqrt(_|$) mask threshold gate""",
    ),
    (ATTENTION, r"^_?(fwd|bwd)_kernel (^|_)(fwd|bwd)_\w*kernel_stage ^_?fwd_inner"),
    (MATMUL, r"^kernel_cutlass moe conv cask cudnn"),
    (NORMALISATION, r"norm"),
    (INDEX, r"cache token _ids?(_|$)"),
    (COPY, r"copy cast layout pack"),
    (MEMORY, r"fill init"),
)

# What the kind of a module tells of a kernel whose name and op do not.
MODULES: Table = (
    (NORMALISATION, r"norm"),
    (LOSS, r"loss cross_?entropy"),
    (SOFTMAX, r"softmax"),
    (RANDOM, r"dropout sampler"),
    (ELEMENTWISE, r"rotary rope silu gelu relu swiglu activation actfn act_fn"),
    (INDEX, r"embed router topk gating"),
    (
        MATMUL,
        r"linear conv mlp moe expert lm_?head feed_?forward (^|[._])(q|k|v|o|qkv|out|up|down|gate|gate_up)_?proj dense",
    ),
    (ATTENTION, r"attention attn"),
)

# What a namespace tells of a function whose own name does not.
SCOPES: Table = (
    (COMMUNICATION, r"nccl rccl nvshmem deep_ep msccl c10d symmetric_memory pplx mori uccl"),
    (ATTENTION, r"(^|::)(pytorch_)?flash(::|_|mla|$) fmha attn attention xqa mmha (^|_)fa0"),
    (NORMALISATION, r"(^|::)\w*norm(alization)?(::|$)"),
    (RANDOM, r"sampling"),
    (ELEMENTWISE, r"activation"),
    (INDEX, r"fbgemm_gpu routing"),
    (MATMUL, r"gemvx cublas deep_gemm cask cudnn::(cnn|winograd|conv) marlin (?<!fb)gemm cutlass"),
)


@lru_cache(maxsize=1 << 15)
def class_of_word(word: str) -> str | None:
    """What a name tells, without its namespaces, arguments and parameters; None where it says nothing.

    >>> class_of_word("s16816gemm_relu"), class_of_word("FusedAddRMSNormKernel"), class_of_word("kernel2")
    ('matmul', 'normalisation', None)
    """
    return _class_of(_spelling(word), WORDS)


@lru_cache(maxsize=1 << 15)
def default_class(word: str) -> str | None:
    """What a generic name most often stands for; None where nothing is known.

    >>> default_class("vectorized_elementwise_kernel"), default_class("DeviceScanKernel"), default_class("my_kernel")
    ('elementwise', 'reduction', None)
    """
    return _class_of(_spelling(word), DEFAULTS)


@lru_cache(maxsize=1 << 12)
def class_of_scope(scope: str) -> str | None:
    """What namespaces tell.

    >>> class_of_scope("internal::gemvx"), class_of_scope("at::native")
    ('matmul', None)
    """
    return _class_of(_spelling(scope), SCOPES)


@lru_cache(maxsize=1 << 12)
def class_of_module(name: str) -> str | None:
    """What a module tells of a kernel that ran in it.

    >>> class_of_module("LlamaRMSNorm_3"), class_of_module("model.layers.0.mlp"), class_of_module("LlamaDecoderLayer_0")
    ('normalisation', 'matmul', None)
    """
    return _class_of(_spelling(name.rpartition("/")[2]), MODULES)


def first_class(table: Table, text: str) -> str | None:
    """The class of the first row of a table that has a word in the text."""
    return _class_of(text, table)


_DIGITS = re.compile(r"\d+")


def _spelling(word: str) -> str:
    return _DIGITS.sub("0", word[:LONGEST_WORD].lower())


@lru_cache(maxsize=1 << 15)
def _class_of(spelling: str, table: Table) -> str | None:
    """The class of the first row that has a word in the spelling. Only words are tried whose first letters are in it."""
    words, beginnings = _index(table)
    found, at = list(words[""]), beginnings.search(spelling)
    while at is not None:
        found += words[at[0]]
        at = beginnings.search(spelling, at.start() + 1)
    return next((table[row][0] for row, word in sorted(found) if _pattern(word).search(spelling)), None)


@cache
def _index(table: Table) -> tuple[dict[str, list[tuple[int, str]]], re.Pattern[str]]:
    """The words of a table, with their row, by three letters that whatever has them must have ('' of those that need not have
    any); and a pattern that finds any such letters at once."""
    words: dict[str, list[tuple[int, str]]] = {"": []}
    for row, (_, of_row) in enumerate(table):
        for word in of_row.split():
            words.setdefault(_letters(word), []).append((row, word))
    tree: dict[str, dict[str, str]] = {}
    for three in filter(None, words):
        thirds = tree.setdefault(three[0], {})
        thirds[three[1]] = thirds.get(three[1], "") + three[2]
    branches = ("|".join(f"{second}[{thirds}]" for second, thirds in seconds.items()) for seconds in tree.values())
    anywhere = "|".join(f"{first}(?:{branch})" for first, branch in zip(tree, branches, strict=True))
    return words, re.compile(anywhere or "(?!)")


_OPTIONAL = re.compile(r"\((?:[^()]|\([^()]*\))*\)[?*]?|\[[^\]]*\][?*+]?|\\w[*+]?|\w[?*]|\.\*|[\^$|]")


def _letters(word: str) -> str:
    """Three letters in a row that whatever matches a word must have; '' where there are none.

    >>> _letters(r"(?<!fb)gemm"), _letters("all_?reduce"), _letters("^b?mm$")
    ('gem', 'red', '')
    """
    longest = max(_OPTIONAL.sub(" ", word).split(), key=len, default="")
    return longest[:3] if len(longest) >= 3 else ""


@cache
def _pattern(word: str) -> re.Pattern[str]:
    """Compiled when a name first needs it: most never do."""
    return re.compile(word)
