"""All layouts of a model on a cluster's GPUs that fit its memory, by the time of a step.

What is tried is what people run; docs/how-to/plan.md lists it. Of layouts that differ in recomputation alone, the one that
recomputes least and fits is taken: no other is faster. One whose FLOPs and bubble alone take longer than the best ones is not
timed.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from flopwise.errors import FlopwiseError
from flopwise.records.planned import Planned, PlannedMemory, PlannedStep
from flopwise.spec.cluster import Cluster
from flopwise.spec.gpu import gpu
from flopwise.spec.layout import RECOMPUTED, SHARDED, Job, Layout, divisors, misfit
from flopwise.spec.planned_model import PlannedModel
from flopwise.spec.software import cannot

Timed = Callable[[Job], PlannedStep]
Held = Callable[[Job], PlannedMemory]

MOST_STAGES, MOST_VIRTUAL, MOST_MICRO = 128, 16, 64
LEAST_TOKENS = 4096  # of a sequence that each context rank keeps
MOST_TOKENS = 65_536  # of a micro-batch
_RECOMPUTED_FLOPS = {"none": 0.0, "selective": 0.0, "full": 1 / 3}  # of a step's, at least


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be laid out; `fixed`: fields of a layout that are given."""

    model: PlannedModel
    cluster: Cluster
    gpus: int
    batch: int
    context: int
    limit_bytes: int
    fixed: dict[str, Any] = {}
    uneven: float = 1.0  # Job's

    def job(self, layout: Layout) -> Job:
        sizes = {"batch": self.batch, "context": self.context}
        return Job(model=self.model, cluster=self.cluster, layout=layout, **sizes, uneven=self.uneven)


class Fitting(NamedTuple):
    """A layout that fits, and what it takes at least."""

    least_s: float
    job: Job
    memory: PlannedMemory


class Found(NamedTuple):
    """The best of each kind of layout, the fastest first; the leanest of each that does not fit."""

    best: list[Planned]
    too_large: list[tuple[Layout, PlannedMemory]]
    fitting: int
    tried: int


def kind(layout: Layout) -> tuple[int | str, ...]:
    """What makes a layout another one, not a variant."""
    return layout.tensor, layout.context, layout.pipeline, layout.expert, layout.sharded


def search(question: Question, timed: Timed, held: Held, most: int = 8) -> Found:
    """The `most` best kinds of layout."""
    fitting, too_large, tried = _fitting(question, held)
    best: dict[tuple[int | str, ...], Planned] = {}
    for one in sorted(fitting, key=lambda fit: fit.least_s):
        known = sorted(found.step.wall_s for found in best.values())
        if len(known) >= most and one.least_s > known[most - 1]:
            break
        step, key = timed(one.job), kind(one.job.layout)
        if key not in best or step.wall_s < best[key].step.wall_s:
            best[key] = Planned(layout=one.job.layout, step=step, memory=one.memory)
    ranked = sorted(best.values(), key=lambda found: found.step.wall_s)
    misfits = {key: found for key, found in too_large.items() if key not in best}
    return Found(ranked[:most], list(misfits.values()), len(fitting), tried)


def fits(question: Question, held: Held) -> bool:
    """Whether any layout does, with all that lowers memory."""
    lean = {"micro_batch": 1, "recompute": "full"} | question.fixed
    asked = msgspec.structs.replace(question, fixed=lean)
    jobs = (asked.job(msgspec.structs.replace(one, recompute=lean["recompute"])) for one in _variants(asked))
    return any(held(job).peak_bytes <= asked.limit_bytes for job in jobs)


def _fitting(question: Question, held: Held) -> tuple[list[Fitting], dict[Any, tuple[Layout, PlannedMemory]], int]:
    """Layouts that fit, with the least recomputation; of others the leanest of each kind; how many were looked at."""
    found: list[Fitting] = []
    too_large: dict[Any, tuple[Layout, PlannedMemory]] = {}
    full: set[tuple[Any, ...]] = set()  # variants for which a smaller micro-batch does not fit already
    tried = 0
    for one in _variants(question):
        line = (*kind(one), one.schedule, one.virtual, one.shard_ranks)
        if line in full:
            continue
        for recompute in _given(question, "recompute", RECOMPUTED):
            job = question.job(msgspec.structs.replace(one, recompute=recompute))
            memory, tried = held(job), tried + 1
            if memory.peak_bytes <= question.limit_bytes:
                found.append(Fitting(_least_s(job), job, memory))
                break
        else:
            full.add(line)
            if (key := kind(one)) not in too_large or memory.peak_bytes < too_large[key][1].peak_bytes:
                too_large[key] = job.layout, memory
    return found, too_large, tried


def _given(question: Question, field: str, usual: Any) -> Any:
    return (question.fixed[field],) if field in question.fixed else usual


def _variants(question: Question) -> Iterator[Layout]:
    """Every layout, with no recomputation; small micro-batches first."""
    others = {name: value for name, value in question.fixed.items() if name != "recompute"}
    shares = _shares(others)
    for mesh in _meshes(question):
        for sharded, ranks in _shardings(question, mesh):
            if cannot(others.get("software", "megatron"), sharded, "") is not None:
                continue
            for micro in _given(question, "micro_batch", _micro_batches(question, mesh)):
                for schedule, virtual in _schedules(question, mesh, micro):
                    made: dict[str, Any] = {"sharded": sharded, "shard_ranks": ranks, "micro_batch": micro}
                    made |= {"schedule": schedule, "virtual": virtual}
                    made |= {"sequence": others.get("sequence", mesh["tensor"] > 1 and shares)}
                    layout = Layout(**mesh | others | made)
                    if misfit(question.model, layout, question.batch, question.context) is None:
                        yield layout


def _shares(fixed: dict[str, Any]) -> bool:
    return fixed.get("software") != "megatron-2021"  # sequence parallelism came later


def _meshes(question: Question) -> Iterator[dict[str, int]]:
    spec, gpus = question.model.spec, question.gpus
    near = divisors(min(question.cluster.domain, gpus))
    tensors = [one for one in near if spec.n_heads % one == 0 and spec.d_ff % one == 0]
    contexts = [2**power for power in range(30) if 2**power <= max(1, question.context // LEAST_TOKENS)]
    for tensor in _given(question, "tensor", tensors):
        for context in _given(question, "context", contexts):
            rest, left = divmod(gpus, tensor * context)
            for pipeline in [] if left else _given(question, "pipeline", _stages(rest, spec.n_layers)):
                data, left = divmod(rest, pipeline)
                if data and not left and question.fixed.get("data", data) == data:
                    mesh = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}
                    yield from _with_experts(question, mesh)


def _with_experts(question: Question, mesh: dict[str, int]) -> Iterator[dict[str, int]]:
    experts, ranks = question.model.experts, mesh["data"] * mesh["context"] * mesh["tensor"]
    shares = [one for one in divisors(experts.count) if ranks % one == 0] if experts else [1]
    for expert in _given(question, "expert", shares):
        yield mesh | {"expert": expert}


def _stages(gpus: int, layers: int) -> list[int]:
    """Powers of two, and what divides the layers, also with the embedding and the loss counted as one each."""
    most = min(layers, MOST_STAGES)
    whole = {one for one in range(1, most + 1) if layers % one == 0 or (layers + 2) % one == 0 or one & (one - 1) == 0}
    return [one for one in sorted(whole) if gpus % one == 0]


def _shardings(question: Question, mesh: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Which of the state the data ranks share; and among how many, where the weights also are copied (a hybrid)."""
    alone = mesh["data"] * mesh["context"] == 1
    for sharded in _given(question, "sharded", ("none",) if alone else SHARDED):
        near = question.cluster.domain // mesh["tensor"]
        groups = [0, *(one for one in (near, 8 * near) if 1 < one < mesh["data"])] if sharded == "weights" else [0]
        for ranks in _given(question, "shard_ranks", groups):
            yield sharded, ranks


def _micro_batches(question: Question, mesh: dict[str, int]) -> list[int]:
    each, left = divmod(question.batch, mesh["data"])
    tokens = question.context // mesh["context"]
    if left:
        return []
    sizes = [2**power for power in range(7) if each % 2**power == 0 and 2**power <= MOST_MICRO]
    return [one for one in sizes if one == 1 or one * tokens <= MOST_TOKENS]


def _schedules(question: Question, mesh: dict[str, int], micro: int) -> list[tuple[str, int]]:
    """Interleaved where the parts are equal and micro-batches come in rounds of the stages, as Megatron wants it."""
    pipeline = mesh["pipeline"]
    if pipeline == 1:
        usual = [("1f1b", 1)]
    else:
        usual = [("1f1b", 1)]
        count = question.batch // (mesh["data"] * micro)
        if count % pipeline == 0:
            usual += [("interleaved", one) for one in _even_parts(question, pipeline)]
        if question.fixed.get("schedule") == "zero-bubble" or question.fixed.get("software") == "torchtitan":
            usual.append(("zero-bubble", 1))
    wanted = {name: question.fixed[name] for name in ("schedule", "virtual") if name in question.fixed}
    if set(wanted) == {"schedule", "virtual"}:
        return [(wanted["schedule"], wanted["virtual"])]
    return [(s, v) for s, v in usual if wanted.get("schedule", s) == s and wanted.get("virtual", v) == v]


def _even_parts(question: Question, pipeline: int) -> list[int]:
    """How many equal parts each rank can have, also with the embedding and the loss counted as layers."""
    layers = question.model.spec.n_layers
    parts = _given(question, "virtual", range(2, min(MOST_VIRTUAL, (layers + 2) // pipeline) + 1))
    whole = (pipeline * one for one in parts if one > 1)
    return [one // pipeline for one in whole if layers % one == 0 or (layers + 2) % one == 0]


def _least_s(job: Job) -> float:
    """What its matmuls take at the GPUs' peak, with the bubble: no layout is faster."""
    one, layout = gpu(job.cluster.gpu), job.layout
    peak = max(one.peaks.values(), default=0.0) * (2 if layout.precision == "nvfp4" else 1)
    if layout.precision in ("bf16", "fp16"):
        peak = one.peak(layout.precision) or peak
    if not peak:
        return 0.0
    weights = job.model.active_parameters() - job.model.spec.vocab * job.model.spec.d_model
    flops = 6.0 * weights * job.tokens * (1 + _RECOMPUTED_FLOPS[layout.recompute])
    bubble = 0.0 if layout.schedule == "zero-bubble" else (layout.pipeline - 1) / (layout.virtual * job.micro_batches)
    return flops / (peak * layout.gpus) * (1 + bubble)


def refused(question: Question, too_large: list[tuple[Layout, PlannedMemory]]) -> FlopwiseError:
    """Why no layout is left."""
    name, gpus, fixed = question.model.name, question.gpus, question.fixed
    if too_large:
        least = min(memory.peak_bytes for _, memory in too_large)
        sizes = f"the leanest layout needs {least / 1e9:.0f} of {question.limit_bytes / 1e9:.0f} GB a GPU"
        return FlopwiseError(f"{name} does not fit on {gpus} GPUs: {sizes}", "more GPUs, or fewer constraints")
    ranks = {word: fixed[field] for word, field in _WORDS.items() if field in fixed}
    asked = " ".join(f"{word} {value}" for word, value in ranks.items())
    product = 1
    for value in ranks.values():
        product *= value
    if gpus % product or ("data" in fixed and len(ranks) == len(_WORDS) and gpus != product):
        return FlopwiseError(f"{gpus} GPUs do not divide into {asked}", f"a multiple of {product}")
    rest = {} if "data" in fixed else {"data": gpus // product}
    known = fixed | {"sequence": _shares(fixed) and fixed.get("tensor", 1) > 1}
    why = misfit(question.model, Layout(**known | rest), question.batch, question.context)
    return FlopwiseError(*why) if why is not None else _undivided(question)


def _undivided(question: Question) -> FlopwiseError:
    batch = f"a batch of {question.batch} sequences"
    if question.fixed.get("virtual", 1) > 1 or question.fixed.get("schedule") == "interleaved":
        message = f"{batch} does not come in rounds of the pipeline's ranks, as interleaved parts need"
        return FlopwiseError(message, "another --global-batch, or omit --virtual")
    return FlopwiseError(f"no layout of {question.gpus} GPUs divides {batch}", "another --global-batch")


_WORDS = {"--tp": "tensor", "--cp": "context", "--pp": "pipeline", "--dp": "data"}
