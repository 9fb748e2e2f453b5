"""A layout as the flags of the programs that train: torchrun, torchtitan, Megatron-LM, accelerate."""

from collections.abc import Callable

from flopwise.records.plan import Plan
from flopwise.records.table import Table
from flopwise.render.json import document
from flopwise.render.passages import Passages
from flopwise.render.plan_screen import short
from flopwise.render.table import View, columns
from flopwise.spec import fields

_Lines = tuple[list[str], list[str]]  # what to type, and what it cannot say
_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "ZBVZeroBubble"}


def _torchrun(p: Plan, script: str = "train.py") -> str:
    hosts, each = max(1, p.gpus // p.host), min(p.host, p.gpus)
    meet = " --rdzv-backend c10d --rdzv-endpoint $HEAD:29500" if hosts > 1 else " --standalone"
    return f"torchrun --nnodes {hosts} --nproc-per-node {each}{meet} {script}"


def _torchtitan(p: Plan) -> _Lines:
    """Names as in torchtitan's configuration of 2025 (torchtitan/config/job_config.py)."""
    one = p.best.layout
    shard = 1 if one.sharded == "none" else one.shard_ranks or one.data
    local = p.batch // one.data if one.pipeline > 1 else one.micro_batch
    flags = {
        "parallelism.data_parallel_replicate_degree": one.data // shard,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.tensor_parallel_degree": one.tensor,
        "parallelism.context_parallel_degree": one.context,
        "parallelism.pipeline_parallel_degree": one.pipeline,
        "parallelism.expert_parallel_degree": one.expert,
        "training.seq_len": p.context,
        "training.local_batch_size": local,
        "training.global_batch_size": p.batch,
        "activation_checkpoint.mode": one.recompute,
    }
    if one.pipeline > 1:
        flags["parallelism.pipeline_parallel_schedule"] = _SCHEDULES[one.schedule]
        flags["parallelism.pipeline_parallel_microbatch_size"] = one.micro_batch
    notes = (
        ["the optimizer alone is not sharded there: FSDP shards the weights, too"] if one.sharded == "optimizer" else []
    )
    notes += [f"{one.precision} is a model converter there"] if one.precision not in ("bf16", "fp16") else []
    return [_torchrun(p, "-m torchtitan.train"), *(f"--{name} {value}" for name, value in flags.items())], notes


def _megatron(p: Plan) -> _Lines:
    """Names as in megatron/training/arguments.py."""
    one = p.best.layout
    flags = [
        f"--tensor-model-parallel-size {one.tensor}",
        f"--pipeline-model-parallel-size {one.pipeline}",
        f"--context-parallel-size {one.context}",
        f"--micro-batch-size {one.micro_batch}",
        f"--global-batch-size {p.batch}",
        f"--seq-length {p.context}",
        "--fp16" if one.precision == "fp16" else "--bf16",
    ]
    wanted = {
        "--sequence-parallel": one.sequence and one.tensor > 1,
        f"--num-virtual-stages-per-pipeline-rank {one.virtual}": one.virtual > 1,
        f"--expert-model-parallel-size {one.expert} --expert-tensor-parallel-size {one.expert_tensor}": one.expert > 1,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather": one.sharded == "optimizer",
        "--use-megatron-fsdp --use-distributed-optimizer --no-gradient-accumulation-fusion": one.sharded
        in ("gradients", "weights"),
        "--data-parallel-sharding-strategy optim_grads_params": one.sharded == "weights",
        "--data-parallel-sharding-strategy optim_grads": one.sharded == "gradients",
        f"--num-distributed-optimizer-instances {one.data // (one.shard_ranks or one.data)}": bool(one.shard_ranks),
        "--cp-comm-type a2a": one.context > 1 and one.context_way == "ulysses",
        "--recompute-granularity selective": one.recompute == "selective",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": one.recompute == "full",
        "--fp8-format hybrid": one.precision == "fp8",
        "--fp8-format e4m3 --fp8-recipe mxfp8": one.precision == "mxfp8",
        "--fp4-format e2m1": one.precision == "nvfp4",
        "--optimizer-cpu-offload": one.offload,
    }
    flags += [f"--{flag}" for some, on in wanted.items() if on for flag in some.removeprefix("--").split(" --")]
    notes = ["Megatron-LM has no zero-bubble schedule"] if one.schedule == "zero-bubble" else []
    return [_torchrun(p, "pretrain_gpt.py"), *flags], notes


def _accelerate(p: Plan) -> _Lines:
    """Fields of accelerate.ParallelismConfig (src/accelerate/parallelism_config.py)."""
    one = p.best.layout
    shard = 1 if one.sharded == "none" else one.shard_ranks or one.data
    sizes = {
        "dp_replicate_size": one.data // shard,
        "dp_shard_size": shard,
        "tp_size": one.tensor,
        "cp_size": one.context,
    }
    steps = p.batch // (one.data * one.micro_batch)
    lines = [
        "from accelerate import Accelerator",
        "from accelerate.parallelism_config import ParallelismConfig",
        "accelerator = Accelerator(",
        "    parallelism_config=ParallelismConfig(",
        *(f"        {name}={size}," for name, size in sizes.items()),
        "    ),",
        f"    gradient_accumulation_steps={steps},",
        f'    mixed_precision="{one.precision}",',
        ")",
    ]
    left = {"pipeline ranks": one.pipeline, "expert ranks": one.expert}
    notes = [f"ParallelismConfig has no {name}: plan again with --{name[0]}p 1" for name, n in left.items() if n > 1]
    notes += (
        ["the optimizer alone is not sharded there: FSDP shards the weights, too"] if one.sharded == "optimizer" else []
    )
    return lines, notes


_PROGRAMS: dict[str, Callable[[Plan], _Lines]] = {
    "torchrun": lambda p: ([_torchrun(p)], []),
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "accelerate": _accelerate,
}
PROGRAMS = tuple(_PROGRAMS)


def flag_lines(p: Plan, program: str) -> _Lines:
    """What to type for the plan's layout, and what the program cannot do of it."""
    fields.one_of("flags", program, PROGRAMS)
    return _PROGRAMS[program](p)


def flags_screen(p: Plan, program: str) -> Passages:
    """Lines to copy."""
    lines, notes = flag_lines(p, program)
    joined = "\n".join(lines) if program == "accelerate" else " \\\n  ".join(lines)
    return Passages(f"{p.model}: {short(p.best.layout)}, for {program}", (("", joined),), tuple(notes))


def flags_view(p: Plan, program: str) -> View:
    """The same for files and programs."""
    lines, notes = flag_lines(p, program)
    rows = tuple({"line": line} for line in lines)
    table = Table("flags", f"{p.model} for {program}", columns("line [sentence]"), rows, tuple(notes))
    return View([table], document("flags", program=program, lines=lines, notes=notes))
