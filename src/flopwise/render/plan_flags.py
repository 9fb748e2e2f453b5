"""A layout as the flags of the programs that train: torchrun, torchtitan, Megatron-LM, accelerate."""

from collections.abc import Callable

from flopwise.records.plan import Plan
from flopwise.records.table import Table
from flopwise.render.json import document
from flopwise.render.megatron_flags import megatron_flags
from flopwise.render.passages import Passages
from flopwise.render.plan_screen import short
from flopwise.render.table import View, columns
from flopwise.spec import fields
from flopwise.spec.software import PROGRAMS

_Lines = tuple[list[str], list[str]]  # what to type, and what it cannot say
_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "ZBVZeroBubble"}
_RING = "context ranks pass keys and values around a ring there: Ulysses has no flag"


def _torchrun(p: Plan, script: str = "train.py") -> list[str]:
    hosts, each = max(1, p.gpus // p.host), min(p.host, p.gpus)
    meet = "--rdzv-backend c10d --rdzv-endpoint $HEAD:29500" if hosts > 1 else "--standalone"
    return [f"torchrun --nnodes {hosts} --nproc-per-node {each}", meet, script]


def _torchrun_alone(p: Plan) -> _Lines:
    return _torchrun(p), [f"the layout and its micro-batch of {p.best.layout.micro_batch} are your script's affair"]


def _torchtitan(p: Plan) -> _Lines:
    """Names as in torchtitan's configuration of late 2025 (torchtitan/config/job_config.py, docs/float8.md)."""
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
    notes = [_RING] if one.context > 1 and one.context_way == "ulysses" else []
    typed = [f"--{name} {value}" for name, value in flags.items()]
    typed += ["--parallelism.fsdp_reshard_after_forward never"] if one.sharded == "gradients" else []
    typed += ["--parallelism.enable_async_tensor_parallel"] if one.software == "torchtitan-async" else []
    if one.pipeline > 1:
        typed.append(f"--parallelism.pipeline_parallel_schedule {_SCHEDULES[one.schedule]}")
        typed.append(f"--parallelism.pipeline_parallel_microbatch_size {one.micro_batch}")
    if one.virtual > 1:
        typed += _stages(p, notes)
    typed += _low_precision(p, notes)
    notes.append("the model is that of --job.config_file: give the one that was planned")
    return [*_torchrun(p, "-m torchtitan.train"), *typed, "--compile.enable"], notes


def _stages(p: Plan, notes: list[str]) -> list[str]:
    """Layers of a part: the first and the last part have one less, unless the layers divide by themselves."""
    parts = p.best.layout.pipeline * p.best.layout.virtual
    layers = p.shape.spec.n_layers if p.shape else 0
    name, less = "--parallelism.pipeline_parallel_", "stage_less_layers"
    if layers % parts == 0:
        own = [f"{name}first_{less} 0", f"{name}last_{less} 0"]
        return [f"{name}layers_per_stage {layers // parts}", *own]
    if (layers + 2) % parts:
        notes.append(f"{layers} layers do not divide into {parts} parts: give --parallelism.module_fqns_per_model_part")
    return [f"{name}layers_per_stage {-(-(layers + 2) // parts)}"]


def _low_precision(p: Plan, notes: list[str]) -> list[str]:
    one, made = p.best.layout, "--quantize.linear"
    if one.precision == "fp8":
        gathers = ["enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"]
        gathered = [f"{made}.float8.{name}" for name in gathers] if one.sharded == "weights" else []
        return ["--model.converters quantize.linear.float8", *gathered]
    if one.precision == "mxfp8":
        return ["--model.converters quantize.linear.mx", f"{made}.mx.recipe_name mxfp8_cublas"]
    notes += [f"torchtitan has no converter to {one.precision}"] if one.precision not in ("bf16", "fp16") else []
    return []


def _megatron(p: Plan) -> _Lines:
    environment, flags, notes = megatron_flags(p)
    return [*environment, *_torchrun(p, "pretrain_gpt.py"), *flags], notes


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
    low = "fp8" if one.precision in ("fp8", "mxfp8") else one.precision
    again = f"fsdp_version=2, activation_checkpointing={one.recompute != 'none'}"
    sharded = [f"    fsdp_plugin=FullyShardedDataParallelPlugin({again}),"] if shard * one.context > 1 else []
    lines = [
        "from accelerate import Accelerator",
        *(["from accelerate import FullyShardedDataParallelPlugin"] if sharded else []),
        "from accelerate.parallelism_config import ParallelismConfig",
        "accelerator = Accelerator(",
        "    parallelism_config=ParallelismConfig(",
        *(f"        {name}={size}," for name, size in sizes.items()),
        "    ),",
        *sharded,
        f"    gradient_accumulation_steps={steps},",
        f'    mixed_precision="{low}",',
        ")",
        f"# DataLoader(…, batch_size={one.micro_batch}): sequences of {p.context} tokens",
    ]
    notes = [_RING] if one.context > 1 and one.context_way == "ulysses" else []
    return lines, notes


_PRINTED: dict[str, Callable[[Plan], _Lines]] = {
    "torchrun": _torchrun_alone,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "accelerate": _accelerate,
}


def flag_lines(p: Plan, program: str) -> _Lines:
    """What to type for the plan's layout, and what the program cannot do of it."""
    fields.one_of("flags", program, PROGRAMS)
    return _PRINTED[program](p)


def flags_screen(p: Plan, program: str) -> Passages:
    """Lines to copy."""
    lines, notes = flag_lines(p, program)
    joined = "\n".join(lines) if program == "accelerate" else " \\\n  ".join(lines)
    title = f"{p.model}: {short(p.best.layout)}, for {program}"
    return Passages(title, (("", joined),), tuple(notes), script=True)


def flags_view(p: Plan, program: str) -> View:
    """The same for files and programs."""
    lines, notes = flag_lines(p, program)
    rows = tuple({"line": line} for line in lines)
    table = Table("flags", f"{p.model} for {program}", columns("line [sentence]"), rows, tuple(notes))
    return View([table], document("flags", program=program, lines=lines, notes=notes))
