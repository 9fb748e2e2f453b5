"""The layout of a training run, what it takes, and the next best ones, before a cluster is rented."""

from pathlib import Path
from typing import Any

import msgspec

from flopwise import units
from flopwise.analysis.exchanges import measured_cluster
from flopwise.api.plan_request import (
    MOST_GPUS,
    batch_note,
    batch_of,
    check_pipeline,
    fixed_fields,
    for_program,
    memory_note,
    one_link,
)
from flopwise.errors import FlopwiseError
from flopwise.predict.flops import training_time
from flopwise.predict.parallel.memory import planned_memory
from flopwise.predict.parallel.search import Found, Question, fits, refused, search
from flopwise.predict.parallel.step import planned_step
from flopwise.records.plan import Plan
from flopwise.records.planned import PARTS, Planned
from flopwise.spec import fields
from flopwise.spec.cluster import Cluster
from flopwise.spec.cluster import cluster as cluster_named
from flopwise.spec.gpu import Gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.planned_model import PlannedModel
from flopwise.spec.planned_presets import planned_model
from flopwise.store import StoredRun, find, runs_root

_USUAL_CONTEXT = 8192
_SHOWN, _TOO_LARGE_SHOWN = 6, 2


def plan(
    model: str,
    *,
    gpu: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    link: str = "",
    tokens: float | None = None,
    price: float | None = None,
    mfu: float | None = None,
    global_batch: int | str | None = None,
    context: int | None = None,
    memory_limit: int | None = None,
    set: dict[str, Any] | None = None,  # noqa: A002  as the option
    fsdp: bool = False,
    measured: str | Path | None = None,
    uneven: float = 1.0,
    program: str | None = None,
    runs: str | Path | None = None,
    **layout: Any,
) -> Plan:
    """The fastest layout that fits, its time, memory, days and money; and the next best, each with why it loses.

    `gpu` or `cluster` (a name or a TOML file) says where; without `gpus` or `nodes` (hosts), the fewest that it fits on.
    `layout` fixes parts of it: tp, pp, cp, ep, dp (ranks), micro_batch, virtual, sharded, shard_ranks, schedule, recompute,
    context_way, precision, software, offload. `global_batch` is sequences, or '4M-tokens'. `mfu` takes a given utilisation
    instead of the predicted one. `measured` is a run of collectives (op:all-reduce, …) whose times replace the links' datasheet;
    `uneven` the tokens of the busiest expert rank over the mean. `program` keeps to what torchtitan, megatron, accelerate or
    torchrun run.

    >>> flopwise.plan("llama3-70b", gpu="h100", gpus=1024, tokens=15e12).best.layout        # doctest: +SKIP
    """
    asked = planned_model(model, set)
    where = _cluster(gpu, cluster, link)
    if measured is not None:
        where = measured_cluster(where, StoredRun.load(find(measured, runs_root(runs))).sound().points)
    fields.number("uneven", uneven, 1.0, 1_000.0)
    fixed = fixed_fields(for_program(program, layout), fsdp)
    check_pipeline(asked.spec.n_layers, fixed)
    fixed["precision"] = _precision(gpu_named(where.gpu), fixed.get("precision"))
    _check(tokens, price, mfu)
    context = _context(asked, context)
    limit = memory_limit if memory_limit is not None else where.memory_bytes or gpu_named(where.gpu).memory_bytes
    if limit is None:
        raise FlopwiseError(f"the memory of {where.gpu} is not known", "--memory-limit 80GB")
    fields.whole("memory_limit", limit, 1, 10**15)

    def question(number: int) -> Question:
        batch = batch_of(global_batch, context, number, fixed)
        sizes = {"gpus": number, "batch": batch, "context": context, "limit_bytes": limit}
        return Question(model=asked, cluster=where, **sizes, fixed=fixed, uneven=uneven)

    whole = question(_gpus(gpus, nodes, where) or _fewest(question, where))
    found = search(whole, planned_step, planned_memory)
    if not found.best:
        raise refused(whole, found.too_large)
    notes = (
        batch_note(global_batch, whole),
        memory_note(limit, where) if memory_limit is not None else "",
        f"One link for both, within a host and between hosts: {link}." if one_link(link, whole) else "",
    )
    made = _plan(whole, found, tokens, price if price is not None else where.price, mfu)
    return msgspec.structs.replace(made, notes=tuple(filter(None, notes)))


def _cluster(gpu: str | None, cluster: str | None, link: str) -> Cluster:
    if gpu is None and cluster is None:
        raise FlopwiseError("no GPU is given", "add --gpu h100, or --cluster dgx-h100")
    found = cluster_named(str(cluster if cluster is not None else gpu), link)
    if gpu is not None and (other := gpu_named(gpu).name) != found.gpu:
        raise FlopwiseError(f"{found.name} has {found.gpu}, not {other}", "omit --gpu, or name another cluster")
    return found


def _precision(card: Gpu, asked: str | None) -> str:
    """What is asked for, if the GPU has it; else half precision."""
    halves = [name for name in ("bf16", "fp16") if card.peak(name)]
    low = ["fp8"] if card.peak("fp8") else []
    micro = ["mxfp8", "nvfp4"] if low and card.capability[:2] in ("10", "12") else []
    known = (*halves, *low, *micro)
    if not known:
        raise FlopwiseError(f"{card.title} has no half precision to train in", "name another GPU")
    if asked is not None and asked not in known:
        raise FlopwiseError(f"{card.title} does not compute in {asked}", f"it has: {', '.join(known)}")
    return asked or known[0]


def _check(tokens: float | None, price: float | None, mfu: float | None) -> None:
    if tokens is not None:
        fields.number("tokens", tokens, 1, 1e18)
    if price is not None:
        fields.number("price", price, 0, 1e6)
    if mfu is not None and not (isinstance(mfu, int | float) and 0 < mfu <= 1):
        raise FlopwiseError(f"mfu = {fields.show(mfu)} is not allowed", units.SHARE_HINT)


def _context(model: PlannedModel, context: int | None) -> int:
    most = model.spec.max_context
    if context is None:
        return min(_USUAL_CONTEXT, most or _USUAL_CONTEXT)
    fields.whole("context", context, 1, 100_000_000)
    if most and model.spec.positions == "learned" and context > most:
        raise FlopwiseError(f"{model.name} has positions for {most} tokens, not {context}", f"--context {most}")
    return context


def _gpus(gpus: int | None, nodes: int | None, where: Cluster) -> int | None:
    if nodes is not None:
        fields.whole("nodes", nodes, 1, MOST_GPUS)
        if gpus not in (None, nodes * where.host):
            raise FlopwiseError(
                f"{nodes} hosts of {where.name} have {nodes * where.host} GPUs, not {gpus}",
                "give one of --gpus and --nodes",
            )
        gpus = nodes * where.host
    if gpus is None:
        return None
    fields.whole("gpus", gpus, 1, MOST_GPUS)
    if gpus > where.host and gpus % where.host:
        lower = gpus - gpus % where.host
        hint = f"{lower} or {lower + where.host}"
        raise FlopwiseError(f"{gpus} GPUs are not whole hosts of {where.host} ({where.title})", hint)
    return gpus


def _fewest(question: Any, where: Cluster) -> int:
    """The fewest GPUs that any layout fits on: powers of two, from those that the constraints ask for."""
    number = 1
    asked: Question = question(1)
    ranks = [asked.fixed.get(name, 1) for name in ("tensor", "pipeline", "context", "data")]
    for one in ranks:
        number *= one
    number *= 1 if number <= where.host or number % where.host == 0 else where.host
    while number <= MOST_GPUS:
        asked = question(number)
        if fits(asked, planned_memory):
            return number
        if "data" in asked.fixed and len([n for n in ("tensor", "pipeline", "context") if n in asked.fixed]) == 3:
            break
        number *= 2
    raise refused(asked, search(asked, planned_step, planned_memory).too_large)


def _plan(question: Question, found: Found, tokens: float | None, price: float | None, mfu: float | None) -> Plan:
    best = found.best[0]
    losers = [msgspec.structs.replace(one, why=_why(best, one)) for one in found.best[1:_SHOWN]]
    losers += _too_large(question, found, best.step.wall_s)
    model, where = question.model, question.cluster
    card = gpu_named(where.gpu)
    rule, peak = None, card.peak("bf16") or card.peak("fp16")
    if tokens is not None and peak is not None:
        used = mfu or best.step.mfu
        rule = training_time(model.active_parameters(), tokens, question.gpus, peak, min(1.0, used)).days
    return Plan(
        model=model.name,
        parameters=model.parameters(),
        active_parameters=model.active_parameters(),
        cluster=where.name,
        cluster_title=where.title,
        gpu=card.title,
        gpus=question.gpus,
        host=where.host,
        batch=question.batch,
        context=question.context,
        limit_bytes=question.limit_bytes,
        best=best,
        others=tuple(losers),
        fitting=found.fitting,
        tried=found.tried,
        tokens=tokens,
        price=price,
        mfu_given=mfu,
        rule_days=rule,
        shape=model,
    )


def _too_large(question: Question, found: Found, best_s: float) -> list[Planned]:
    """Layouts that would be faster, if they had the memory: first those that need up to twice as much."""
    limit, made = question.limit_bytes, []
    for layout, memory in found.too_large:
        if (step := planned_step(question.job(layout))).wall_s < best_s:
            why = f"does not fit: {memory.peak_bytes / 1e9:.0f} of {limit / 1e9:.0f} GB"
            made.append(Planned(layout=layout, step=step, memory=memory, why=why))
    return sorted(made, key=lambda one: (one.memory.peak_bytes > 2 * limit, one.step.wall_s))[:_TOO_LARGE_SHOWN]


def _why(best: Planned, other: Planned) -> str:
    """The part of its time that grows most."""
    more = {part: other.step.parts.get(part, 0.0) - best.step.parts.get(part, 0.0) for part in PARTS}
    worst = max(more, key=lambda part: more[part])
    lost = other.step.wall_s - best.step.wall_s
    if lost <= 0 or more[worst] <= 0:
        return "as fast"
    less = min(more, key=lambda part: more[part])
    saved = f", {less} −{units.duration(-1e9 * more[less])}" if -more[less] > 0.3 * more[worst] else ""
    return f"{worst} +{units.duration(1e9 * more[worst])}{saved}"
