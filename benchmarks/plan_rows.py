"""Published rows as jobs of a plan: what was trained, on which cluster, how it was laid out, and the seconds of a step.

What a document leaves unsaid is said so, in words. A micro-batch that is not stated is the one that a plan would choose,
recomputation none, a pipeline's parts one, the network the vendor's own design.
"""

import re
from typing import Any

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.predict.parallel.step import planned_step
from flopwise.spec.cluster import Cluster
from flopwise.spec.gpu import find_gpu
from flopwise.spec.layout import Job, Layout
from flopwise.spec.model import ModelSpec
from flopwise.spec.planned_model import Experts, Latent, PlannedModel
from flopwise.spec.planned_presets import planned_model

Row = dict[str, Any]
# One GPU, one direction: within a domain; its part of the network where the document says nothing (the vendor's own design).
_LINKS = {
    "V100": (8, 150e9, 12.5e9),
    "A100": (8, 300e9, 25e9),
    "H100": (8, 450e9, 50e9),
    "H200": (8, 450e9, 50e9),
    "B200": (8, 900e9, 50e9),
    "B300": (8, 900e9, 100e9),
    "GB200": (72, 900e9, 50e9),
    "GB300": (72, 900e9, 100e9),
}
_VOCABULARY = {"Qwen3": 151_936, "GPT": 51_200}
_KNOWN = {"GPT OSS 120B": "gpt-oss-120b", "GPT-OSS 20B": "gpt-oss-20b", "Kimi K2": "kimi-k2"}
_LATENT = re.compile(r"q_lora (\d+) kv_lora (\d+) qk (\d+)\+(\d+) v (\d+)")


def model(row: Row) -> PlannedModel | str:
    """The model, or what is missing of it."""
    arch = row.get("arch") or {}
    if not arch.get("n_layers"):
        known = _KNOWN.get(str(row.get("model")))  # by the model's own published configuration
        return planned_model(known) if known else "its architecture is not stated"
    name, heads, moe = str(row.get("model") or "vtrain"), arch["n_heads"], arch.get("moe")
    vocab = arch.get("vocab") or next((n for word, n in _VOCABULARY.items() if name.startswith(word)), None)
    if vocab is None:
        return "its vocabulary is not stated"
    positions: dict[str, Any] = {"mlp": arch.get("mlp") or "gelu"}
    if positions["mlp"] == "gelu":
        longest = row.get("seq_len") or 2048
        positions |= {"norm_kind": "layer", "positions": "learned", "max_context": longest, "tied": True}
    spec = ModelSpec(
        name=name,
        n_layers=arch["n_layers"],
        d_model=arch["d_model"],
        n_heads=heads,
        n_kv_heads=arch.get("n_kv_heads") or heads,
        head_dim=arch.get("head_dim") or arch["d_model"] // heads,
        d_ff=arch.get("d_ff") or moe["d_expert"],
        vocab=vocab,
        **positions,
    )
    latent = _LATENT.search(str(arch.get("attention", "")))
    fields = ("q_rank", "kv_rank", "plain_dim", "rope_dim", "value_dim")
    return PlannedModel(
        spec=spec,
        experts=Experts(
            count=moe["experts"],
            chosen=moe["topk"],
            d_ff=moe["d_expert"],
            shared_d_ff=moe.get("shared") or 0,
            dense_layers=moe.get("dense_layers") or 0,
        )
        if moe
        else None,
        latent=Latent(**dict(zip(fields, map(int, latent.groups()), strict=True))) if latent else None,
    )


def cluster(row: Row) -> Cluster:
    """As far as it is stated; else the vendor's own design of that GPU."""
    family = row["gpu"].partition("-")[0]
    domain, inside, between = _LINKS[family]
    said = str(row.get("interconnect") or "")
    if each := re.search(r"(\d+) Gb/s (?:IB |RDMA )?per GPU", said):
        between = float(each[1]) / 8 * 1e9
    elif node := re.search(r"(\d+) Gb/s per node", said):
        between = float(node[1]) / 8 * 1e9 / 8
    known = find_gpu(_gpu_name(row["gpu"]))
    assert known is not None, row["gpu"]
    size = row.get("gpu_mem_gb")
    return Cluster(
        name=family.lower(),
        title=row["gpu"],
        gpu=known.name,
        domain=domain,
        inside_bytes_s=inside,
        between_bytes_s=between,
        power=_power(row, family),
        memory_bytes=int(size * 1e9) if size else None,
    )


def _power(row: Row, family: str) -> float:
    """Of the usual power: where a document states a cap; and Blackwell Ultra may take 1400 and 1100 W for 1200 and 1000."""
    if "500W" in row["gpu"] or "500 W" in str(row.get("interconnect")):
        return 500 / 700
    return {"GB300": 1400 / 1200, "B300": 1100 / 1000}.get(family, 1.0)


def _gpu_name(name: str) -> str:
    short = {"H100-SXM-80GB": "h100", "A100-SXM-80GB": "a100", "A100-SXM-40GB": "a100-40", "V100-32GB": "v100"}
    return short.get(name) or name.partition("-")[0].lower()


def precision(row: Row) -> str:
    word = row["precision"].lower()
    if "nvfp4" in word:
        return "nvfp4"
    if "mx" in word and "(" not in word:
        return "mxfp8"
    return "fp8" if "8" in word else "fp16" if "fp16" in word else "bf16"


def software(row: Row) -> str:
    """By the document's program; Megatron before 2023 had no flash attention and hid nothing."""
    source, options = row["source"], str(row.get("options") or "")
    if "2104.04473" in source and row.get("fsdp"):
        return "deepspeed-2021"
    if "vTrain" in source or "2104.04473" in source or "2205.05198" in source or "images/tables.tex" in source:
        return "megatron-2021"
    if "f2e5db4" in source:
        return "megatron-2021"
    if "torchtitan" in source:
        return "torchtitan-async" if "async" in options.lower().replace(" ", "") else "torchtitan"
    if "llm-foundry" in source:
        return "pytorch"
    if "Automodel" in source:
        return "automodel"
    return "megatron-overlap" if "1f1b overlap" in options else "megatron"


def layout(row: Row) -> Layout | str:
    unsaid = [name for name in ("tp", "pp", "n_gpus", "global_batch") if not row.get(name)]
    if unsaid:
        return f"not stated: {', '.join(unsaid)}"
    tensor, pipeline, context = row["tp"], row["pp"], row.get("cp") or 1
    data = row.get("dp") or row["n_gpus"] // (tensor * pipeline * context)
    word = str(row.get("fsdp") or "").lower()
    sharded = "gradients" if "shard_grad" in word or "zero-2" in word else "weights" if word else "none"
    program = software(row)
    if sharded == "none" and program in ("megatron", "megatron-overlap"):
        sharded = "optimizer"
    recompute = str(row.get("recompute") or "none").split()[0].strip(",")
    micro = row.get("micro_batch") or 1
    if program.startswith("torchtitan") and pipeline > 1:
        micro = max(1, micro // pipeline)  # its local batch is cut into as many parts as the pipeline has ranks
    virtual = row.get("vp")
    virtual = virtual if isinstance(virtual, int) else 2 if virtual else 1
    expert = row.get("ep") or 1
    return Layout(
        data=data,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert if (row.get("arch") or {}).get("moe") or row.get("model") in _KNOWN else 1,
        expert_tensor=row.get("etp") or 1,
        sharded=sharded,
        sequence=tensor > 1 and (program != "megatron-2021" or bool(row.get("sp"))),
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual=virtual,
        micro_batch=micro,
        recompute={"none": "none", "full": "full"}.get(recompute, "selective"),
        precision=precision(row),
        software=program,
    )


def job(row: Row) -> Job | str:
    """The row as a job, or what it leaves unsaid."""
    shape, laid = model(row), layout(row)
    if isinstance(shape, str):
        return shape
    if isinstance(laid, str):
        return laid
    if "LoRA" in str(row.get("notes")):
        return "it trains adapters alone"
    context = row.get("seq_len")
    if context is None:
        return "its context is not stated"
    try:
        found = Job(model=shape, cluster=cluster(row), layout=laid, batch=row["global_batch"], context=context)
    except FlopwiseError as error:
        return error.message
    return found if row.get("micro_batch") else _fastest(found)


def _fastest(one: Job) -> Job:
    """With the micro-batch that a plan would choose, where the document does not state it."""
    each = one.batch // one.layout.data
    return min(
        (replaced(one, micro_batch=n) for n in (1, 2, 4, 8) if each % n == 0), key=lambda j: planned_step(j).wall_s
    )


def measured_s(row: Row) -> float | None:
    """The seconds of a step: as stated, or from its tokens, or from its FLOPs by the document's own count."""
    if row.get("step_s"):
        return float(row["step_s"])
    context = row.get("seq_len") or 0
    if row.get("tokens_per_s_per_gpu"):
        return float(row["global_batch"] * context / row["tokens_per_s_per_gpu"] / row["n_gpus"])
    arch, rate = row.get("arch") or {}, row.get("tflops_per_gpu")
    if not rate or not context or not arch.get("vocab"):
        return None
    tokens, layers, wide, vocab = row["global_batch"] * context, arch["n_layers"], arch["d_model"], arch["vocab"]
    if "2104.04473" in row["source"] or "96*B" in str(row.get("flops_convention")):
        flops = 96 * tokens * layers * wide**2 * (1 + context / (6 * wide) + vocab / (16 * layers * wide))
    elif arch.get("moe") or arch.get("mlp") != "gelu":
        return None
    else:
        flops = 72 * tokens * layers * wide**2 * (1 + context / (6 * wide) + vocab / (12 * layers * wide))
    return float(flops / rate / 1e12 / row["n_gpus"])


def replaced(one: Job, **changes: object) -> Job:
    """The job with another layout."""
    return msgspec.structs.replace(one, layout=msgspec.structs.replace(one.layout, **changes))
