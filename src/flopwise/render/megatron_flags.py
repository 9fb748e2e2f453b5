"""A layout as Megatron-LM's flags. Names and demands as in megatron/training/arguments.py."""

from collections.abc import Iterable

from flopwise.records.plan import Plan
from flopwise.spec.gpu import find_gpu
from flopwise.spec.layout import Layout
from flopwise.spec.planned_model import Experts, Latent, PlannedModel
from flopwise.spec.software import software

_LEFT_OUT = "data, tokenizer, optimizer and checkpoints are left out"
_NO_SHAPE = "the model's own arguments (--num-layers, --hidden-size, …) are left out: this plan does not know them"


def megatron_flags(p: Plan) -> tuple[list[str], list[str], list[str]]:
    """What the environment needs, the flags one by one, and remarks."""
    one = p.best.layout
    sharded = one.sharded in ("gradients", "weights")
    old = not (card := find_gpu(p.gpu)) or not card.capability.startswith(("10.", "12."))
    environment = ["CUDA_DEVICE_MAX_CONNECTIONS=1"] if one.tensor * one.context > 1 and old and not sharded else []
    flags = [
        f"--tensor-model-parallel-size {one.tensor}",
        f"--pipeline-model-parallel-size {one.pipeline}",
        f"--context-parallel-size {one.context}",
        f"--micro-batch-size {one.micro_batch}",
        f"--global-batch-size {p.batch}",
        f"--seq-length {p.context}",
        "--fp16" if one.precision == "fp16" else "--bf16",
        *_chosen(one, sharded),
    ]
    if p.shape is None:
        return environment, [*flags, *_split(one, 0)], [_NO_SHAPE, _LEFT_OUT]
    return environment, [*flags, *_split(one, p.shape.spec.n_layers), *_model(p.shape, p.context)], [_LEFT_OUT]


def _chosen(one: Layout, sharded: bool) -> list[str]:
    """What is not always there."""
    program, sequence = software(one.software), one.sequence and one.tensor > 1
    wanted = {
        "--sequence-parallel": sequence,
        "--tp-comm-overlap": sequence and program.hides_tensor,
        f"--expert-model-parallel-size {one.expert} --expert-tensor-parallel-size {one.expert_tensor}": one.expert > 1,
        "--moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-dtype fp32": one.expert > 1
        and program.once_a_host,
        "--overlap-moe-expert-parallel-comm": one.expert > 1 and program.hides_experts,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather": one.sharded == "optimizer",
        "--overlap-grad-reduce": one.sharded == "none" and one.data * one.context > 1,
        "--use-megatron-fsdp --use-distributed-optimizer --no-gradient-accumulation-fusion": sharded,
        "--ckpt-format fsdp_dtensor": sharded,
        "--data-parallel-sharding-strategy optim_grads_params": one.sharded == "weights",
        "--data-parallel-sharding-strategy optim_grads": one.sharded == "gradients",
        f"--num-distributed-optimizer-instances {one.data // (one.shard_ranks or one.data)}": bool(one.shard_ranks),
        "--cp-comm-type a2a": one.context > 1 and one.context_way == "ulysses",
        "--recompute-granularity selective": one.recompute == "selective",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": one.recompute == "full",
        "--fp8-format hybrid --fp8-recipe tensorwise": one.precision == "fp8",
        "--fp8-format e4m3 --fp8-recipe mxfp8": one.precision == "mxfp8",
        "--fp4-format e2m1": one.precision == "nvfp4",
        "--optimizer-cpu-offload": one.offload,
    }
    return _apart(some for some, on in wanted.items() if on)


def _apart(groups: Iterable[str]) -> list[str]:
    return [f"--{flag}" for some in groups for flag in some.removeprefix("--").split(" --")]


def _split(one: Layout, layers: int) -> list[str]:
    """How layers become parts: evenly; with the embedding or the loss counted as a layer; or written out."""
    parts = one.pipeline * one.virtual
    if one.pipeline == 1:
        return []
    virtual = [f"--num-virtual-stages-per-pipeline-rank {one.virtual}"] if one.virtual > 1 else []
    counted = {
        0: [],
        1: ["--account-for-loss-in-pipeline-split"],
        2: ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"],
    }
    for extra, named in counted.items():
        if (layers + extra) % parts == 0:
            return [*virtual, *named]
    return [f"--pipeline-model-parallel-layout '{pipeline_layout(layers, parts)}'"]


def pipeline_layout(layers: int, parts: int) -> str:
    """Megatron's word for each part: E the embedding, t a layer, L the loss. The first and last parts have least.

    >>> pipeline_layout(61, 16), pipeline_layout(5, 4), pipeline_layout(3, 5)
    ('Et*3|(t*4|)*13t*3|t*3L', 'Et|t*2|t|tL', 'E|(t|)*3L')
    """
    each, more = divmod(layers, parts)
    own = [each + 1] * more + [each] * (parts - more - 1)  # of all but the first
    if each == 0:
        own = [1] * layers + [0] * (parts - 1 - layers)
    words = ["" if n == 0 else "t" if n == 1 else f"t*{n}" for n in (each, *own)]
    text, at = f"E{words[0]}|", 1
    while at < parts - 1:
        same = next((n for n in range(at, parts - 1) if words[n] != words[at]), parts - 1) - at
        text += f"({words[at]}|)*{same}" if same > 1 else f"{words[at]}|"
        at += same
    return f"{text}{words[-1]}L"


def _model(model: PlannedModel, context: int) -> list[str]:
    spec = model.spec
    flags = [
        f"--num-layers {spec.n_layers}",
        f"--hidden-size {spec.d_model}",
        f"--ffn-hidden-size {spec.d_ff}",
        f"--num-attention-heads {spec.n_heads}",
        f"--max-position-embeddings {max(context, spec.max_context)}",
    ]
    wanted = {
        f"--group-query-attention --num-query-groups {spec.n_kv_heads}": spec.n_kv_heads != spec.n_heads
        and not model.latent,
        f"--kv-channels {spec.head_dim}": spec.head_dim * spec.n_heads != spec.d_model and not model.latent,
        f"--position-embedding-type rope --rotary-base {spec.rope_theta:.0f}": spec.positions == "rope",
        "--normalization RMSNorm": spec.norm_kind == "rms",
        "--swiglu": spec.mlp == "swiglu",
        "--disable-bias-linear": not (spec.out_bias or spec.mlp_bias),
        "--add-qkv-bias": spec.qkv_bias and not (spec.out_bias or spec.mlp_bias),
        "--qk-layernorm": spec.qk_norm,
        "--untie-embeddings-and-output-weights": not spec.tied,
    }
    flags += _apart(some for some, on in wanted.items() if on)
    return [*flags, *(_experts(model, model.experts) if model.experts else []), *_latent(model.latent)]


def _experts(model: PlannedModel, experts: Experts) -> list[str]:
    dense, shared = experts.dense_layers, experts.shared_d_ff
    return [
        f"--num-experts {experts.count}",
        f"--moe-router-topk {experts.chosen}",
        f"--moe-ffn-hidden-size {experts.d_ff}",
        "--moe-grouped-gemm",
        *([f"--moe-shared-expert-intermediate-size {shared}"] if shared else []),
        *([f"--moe-layer-freq '([0]*{dense}+[1]*{model.expert_layers})'"] if dense else []),
    ]


def _latent(latent: Latent | None) -> list[str]:
    if latent is None:
        return []
    return [
        "--multi-latent-attention",
        *([f"--q-lora-rank {latent.q_rank}"] if latent.q_rank else []),
        f"--kv-lora-rank {latent.kv_rank}",
        f"--qk-head-dim {latent.plain_dim}",
        f"--qk-pos-emb-head-dim {latent.rope_dim}",
        f"--v-head-dim {latent.value_dim}",
    ]
