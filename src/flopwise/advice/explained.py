"""A trace explained, with what to change: by its GPU work, or where it has none by the host's time."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import polars as pl

from flopwise import units
from flopwise.advice.findings import changes, findings, host_findings
from flopwise.advice.gather import facts_of
from flopwise.advice.host_facts import HostFacts
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.host_explanation import HostExplanation, explain_host, without_gpu_work
from flopwise.analysis.loop_notes import loop_notes
from flopwise.analysis.reach import reach
from flopwise.analysis.reading import ExplainedTrace, Target, explain_gpu_work, trace_of
from flopwise.analysis.serving import by_model, mismatch
from flopwise.analysis.timings import host_timing_of
from flopwise.analysis.together import device_names, together
from flopwise.analysis.traced_steps import workers
from flopwise.errors import FlopwiseError
from flopwise.predict.flops import matmul_parameters
from flopwise.predict.inference import kv_cache_bytes
from flopwise.records.finding import Finding
from flopwise.records.note import Note
from flopwise.records.run import Point
from flopwise.spec.gpu import find_gpu
from flopwise.spec.model import ModelSpec
from flopwise.spec.workload import workload
from flopwise.store import StoredRun, find, runs_root
from flopwise.trace.attribute import Attribution, attribute
from flopwise.trace.graph_capture import CAPTURE, captures_beside, join_replays, replays_unknown
from flopwise.trace.input_file import check_file
from flopwise.trace.read import read_trace
from flopwise.trace.tables import Trace
from flopwise.work.operation import MATMUL

_WORTH_EXPLAINING = 0.01  # of the busiest device's work: what does less does not run the job
_MOST_DEVICES = 32  # that are explained: each takes half a second of a long trace
_ITEM_BYTES = 2  # of a served model's numbers, where only its shape is known: bf16
_ALL_OF_IT = 0.99  # of the replayed time: no other capture is looked for
LOOP = "loop"  # the key of notes about a watched loop
_Explained = TypeVar("_Explained", Explanation, HostExplanation)


def explained_trace(
    path: Path,
    point: Point | None,
    *,
    timings: Target | None = None,
    gpu: str | None = None,
    runs: str | Path | None = None,
    device: int | None = None,
    capture: str | Path | None = None,
    model: str = "",
) -> Explanation | HostExplanation:
    """Of a file; `point` is the step that it is a trace of, where that is known. `device`: by default the busiest.

    `capture`: the trace in which its CUDA graphs were captured; else one is looked for beside it. `model`: that a server ran."""
    trace = with_captures(read_trace(path), path, capture)
    if not without_gpu_work(trace):
        return _with_subject(explain_devices(trace, point, device, model, timings=timings, gpu=gpu, runs=runs), point)
    untraced = point
    if timings is not None:
        timed = timings if isinstance(timings, StoredRun) else StoredRun.load(find(timings, runs_root(runs)))
        untraced = host_timing_of(timed)
    return _with_subject(explain_host_work(trace, untraced), point)


def with_captures(trace: Trace, path: Path, capture: str | Path | None = None) -> Trace:
    """The trace with the ops and modules of its replayed CUDA graphs, as far as a capture or other kernels tell them."""
    if capture is not None:
        check_file(Path(capture).expanduser(), "capture is the trace in which the CUDA graphs were captured")
        if not trace.graph_launches.height:
            raise FlopwiseError(f"{path} replays no CUDA graph, so a capture tells nothing of it", "omit it")
    unknown = replays_unknown(trace)
    given = [Path(capture).expanduser()] if capture is not None else captures_beside(path, trace) if unknown else []
    best, where = join_replays(trace), path
    for file in given:
        try:
            joined = join_replays(trace, read_trace(file))
        except FlopwiseError:
            if capture is not None:
                raise
            continue
        if joined.share > best.share:
            best, where = joined, file
        if best.share >= _ALL_OF_IT:
            break
    if capture is not None and where == path:
        problem = f"{capture} is not the capture of the CUDA graphs that {path} replays"
        raise FlopwiseError(problem, "its nodes are others, or in another order: name the capture of this batch size")
    if not best.how:
        return trace
    told = (
        f"their capture in {where.name}"
        if best.how == CAPTURE
        else "kernels of the same names that were launched singly"
    )
    text = f"{units.percent(best.share, 0)} of the time of CUDA graphs is attributed to ops and modules by {told}"
    return replace(best.trace, notes=(*best.trace.notes, Note("joined_graphs", text)))


def explain_devices(
    trace: Trace,
    point: Point | None = None,
    device: int | None = None,
    model: str = "",
    *,
    gpu: str | None = None,
    **clock: Any,
) -> Explanation:
    """The GPU work of a device, by default the busiest, with the explanations of all where there are several."""
    attribution = attribute(trace)
    worker, others = _chosen(attribution.table, device, trace.path)
    read = explain_gpu_work(trace, point, gpu=gpu, worker=worker, attribution=attribution, **clock)
    return _with_others(with_findings(_serving_model(read, model, gpu), gpu), trace, others, attribution, gpu)


def _serving_model(read: ExplainedTrace, model: str, gpu: str | None) -> ExplainedTrace:
    """What a named model's shape tells of a server: the weights and the cache, in two bytes a number, on one GPU."""
    e = read.explanation
    if not model:
        return read
    shape = workload(model).subject
    if e.serving is None or not isinstance(shape, ModelSpec):
        problem = (
            "no iteration of a server in it says what it serves" if e.serving is None else f"'{model}' is no model"
        )
        raise FlopwiseError(
            f"model = '{model}' tells nothing of {e.path}: {problem}", "omit it, or name a preset or hf:PATH"
        )
    weights = _ITEM_BYTES * matmul_parameters(shape)
    found = by_model(e.serving, weights, kv_cache_bytes(shape, 1, 1, _ITEM_BYTES))
    matmul_ns = sum(one.gpu_ns for one in e.classes if one.name == MATMUL)
    reason = mismatch(e.serving, found, weights, (matmul_ns, e.busy_ns), find_gpu(gpu or e.gpu))
    if reason:
        hint = "name the model that ran; of one that is split over several GPUs its shape does not tell a GPU's part"
        raise FlopwiseError(f"model = '{model}' is not what {e.path} serves: {reason}", hint)
    return replace(read, explanation=msgspec.structs.replace(e, serving=found))


def _chosen(work: pl.DataFrame, device: int | None, path: str) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """The worker that is asked for, and the others that did a share of the work worth explaining."""
    found = workers(work)
    if not found:
        problem = f"{path} has no GPU work with usable times in it"
        raise FlopwiseError(problem, "was it captured on a GPU, with CUDA activity on?")
    spent = {
        (one, process): ns
        for one, process, ns in work.group_by("device", "process").agg(pl.col("duration_ns").sum()).iter_rows()
    }
    worker = found[0] if device is None else next((one for one in found if one[0] == device), None)
    if worker is None:
        there = ", ".join(map(str, sorted({one for one, _ in found})))
        raise FlopwiseError(f"{path} has no work on device {device}", f"devices in it: {there}")
    most = spent[found[0]]
    return worker, [one for one in found if one != worker and spent[one] >= _WORTH_EXPLAINING * most][:_MOST_DEVICES]


def _with_others(
    found: Explanation, trace: Trace, others: Sequence[tuple[int, int]], attribution: Attribution, gpu: str | None
) -> Explanation:
    """The explanation with those of the trace's other devices, and what they tell together."""
    explained = [found]
    for worker in others:
        with contextlib.suppress(FlopwiseError):  # none of its work falls into steps
            read = explain_gpu_work(trace, None, gpu=gpu, worker=worker, attribution=attribution)
            explained.append(with_findings(read, gpu))
    if len(explained) == 1:
        return found
    explained.sort(key=lambda e: (e.device, e.process))
    all_of_them = together(device_names(explained), explained)
    worked = attribution.table["device"].n_unique()
    all_of_them = msgspec.structs.replace(all_of_them, worked=max(worked, len({e.device for e in explained})))
    return msgspec.structs.replace(found, devices=tuple(explained), together=all_of_them)


def explained_run(run: StoredRun) -> Explanation | HostExplanation | None:
    """Of a run's trace; None where it has none that can be explained."""
    try:
        return explained_trace(*trace_of(run))
    except FlopwiseError:
        return None


def with_findings(read: ExplainedTrace, gpu: str | None = None) -> Explanation:
    """The explanation of GPU work that was read, with what to change and what that would bring it to."""
    facts = facts_of(read, gpu)
    e, found = read.explanation, findings(facts)
    least = facts.decoding.decode_bytes if facts.decoding is not None else None
    reached = reach(e.step_ns, _saved_ns(found), e.waterfall, gpu or e.gpu, least or 0.0)
    return msgspec.structs.replace(e, findings=found, reach=reached)


def explain_host_work(trace: Trace, point: Point | None) -> HostExplanation:
    """The same of a trace without GPU work; `point` is the step without a profiler."""
    explanation = explain_host(trace, point)
    found = host_findings(HostFacts(explanation, point.environment if point is not None else None))
    return msgspec.structs.replace(explanation, findings=found, reach=reach(explanation.step_ns, _saved_ns(found)))


def _saved_ns(found: Sequence[Finding]) -> list[float]:
    return [one.counted_ns or 0.0 for one in changes(found)]


def _with_subject(explanation: _Explained, point: Point | None) -> _Explained:
    """What was traced, and what its loop did besides."""
    if point is None:
        return explanation
    told: list[str] = loop_notes(point)
    return msgspec.structs.replace(
        explanation,
        subject=point.trial.workload.label(),
        notes=(*told, *explanation.notes),
        note_keys=(*[LOOP] * len(told), *explanation.note_keys),
    )
