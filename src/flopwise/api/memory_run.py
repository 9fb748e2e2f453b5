"""A run of `memory`: recorded and kept with its predictions; and read again, without running anything."""

import contextlib
from pathlib import Path

import msgspec

from flopwise import units
from flopwise.capture.isolate import Worker
from flopwise.capture.progress import Progress
from flopwise.errors import FlopwiseError
from flopwise.predict.fitting import gpu_of, too_large
from flopwise.predict.forecast import forecast
from flopwise.predict.memory_levers import memory_levers
from flopwise.records.events import MemoryRequest
from flopwise.records.memory import STACKS, Forecast, forecast_path, read_forecast, read_knowledge, write_whole
from flopwise.records.run import INTERRUPTED, OK, OOM, Point
from flopwise.snapshot.answers import DeviceMemory, MemoryReport
from flopwise.snapshot.read import read_snapshot
from flopwise.snapshot.report import report
from flopwise.spec import fields
from flopwise.spec.workload import Sampling, Trial, Workload
from flopwise.store import Run, StoredRun
from flopwise.store.files import MEMORY

MOST_STEPS = 1000


def capture(
    workload: Workload,
    *,
    device: str,
    steps: int,
    record: str,
    timeout: float,
    root: Path,
    command: str,
    progress: Progress,
    worker: Worker | None = None,
) -> StoredRun:
    """Run the workload in a process of its own, record its memory, predict it, and keep all of it.

    `worker`: one that is there already, for whoever records many workloads; it stays open.
    """
    fields.whole("steps", steps, 1, MOST_STEPS)
    fields.one_of("stacks", record, STACKS)
    trial = Trial(workload=workload, sampling=Sampling(timeout_s=timeout), device=device, group="memory")
    with contextlib.ExitStack() as stack:
        worker = worker or stack.enter_context(Worker())
        there = worker.look(device)  # no such device: say so before there is a run
        run = stack.enter_context(Run.create(root, "memory", workload.target, command, [trial]))
        path = run.memory_path(f"{trial.key()}.pickle").resolve()
        stack.callback(progress.end)
        progress.begin(1, 0)
        if warning := too_large(workload, there):
            progress.note(warning)
        progress.trial(trial)
        request = MemoryRequest(path=str(path), steps=steps, stacks=record)
        point = worker.run(trial, run.log_path(trial.key()), progress.event, memory=request)
        interrupted = point.status == INTERRUPTED  # then nobody wants to wait for a prediction
        told = Forecast() if interrupted else forecast(worker, workload, gpu_of(there.environment))
        write_whole(forecast_path(path), msgspec.json.encode(told))
        run.append(point)
        progress.point(point)
    return StoredRun.load(run.path)


def stored_report(run: StoredRun, stacks: bool = False) -> MemoryReport:
    """The answers of a run of `memory`, from its files alone."""
    point = next((p for p in run.points if p.memory_file), run.points[0] if run.points else None)
    if point is None or run.header.kind != "memory":
        raise FlopwiseError(f"the run {run.header.id} has no memory snapshot", "record one: flopwise memory WORKLOAD")
    workload = point.trial.workload
    path = run.path / MEMORY / Path(point.memory_file or f"{point.key}.pickle").name
    told = read_forecast(path)
    found = MemoryReport(path=str(run.path), devices=())
    if point.memory_file:
        found = report(read_snapshot(path), stacks, read_knowledge(path), workload)
    return msgspec.structs.replace(
        found,
        path=str(path) if point.memory_file else str(run.path),
        label=workload.label(),
        where=_where(point),
        status=point.status,
        reason=point.reason,
        hint=point.hint,
        predictions=told.predictions,
        levers=memory_levers(workload, gpu_of(point.environment)),
        notes=(*_notes(point, found.devices), *_needed(point, told, found.devices), *told.notes),
    )


def _where(point: Point) -> str:
    if point.environment is None:
        return point.trial.device
    return point.environment.gpu.name if point.environment.gpu else "the CPU"


def _notes(point: Point, devices: tuple[DeviceMemory, ...]) -> tuple[str, ...]:
    if point.environment is None or not devices:
        return ()
    if point.environment.gpu is None:
        return (
            "on the CPU every tensor is an allocation of exactly its bytes: no rounding, no workspace, nothing reserved; "
            "what a kernel takes for itself is not seen, nor are an optimizer's step counts",
        )
    if not point.memory:
        return ()
    alone, watched = max(m.peak_bytes for m in point.memory), devices[0].peak.allocated_bytes
    said = f"a step that nobody watched had a peak of {units.size(alone)}; the recorded ones {units.size(watched)}"
    if alone > watched:  # by owner it cannot be told: the trace has the request only, once a block was freed
        said += f": {units.size(alone - watched)} less, most likely the rounding of blocks that were freed since"
    return (said,)


def _needed(point: Point, told: Forecast, devices: tuple[DeviceMemory, ...]) -> tuple[str, ...]:
    """Of a workload that ran out of memory: what it would have needed, and what there was."""
    if point.status != OOM:
        return ()
    notes = []
    failed = next((failure for device in devices for failure in reversed(device.ooms)), None)
    wanted = failed.allocated_bytes + failed.asked_bytes if failed is not None else 0
    if told.predictions:
        one = told.predictions[0]
        said = f"{units.size(one.peak.total_bytes)} at its peak, by the {one.source}"
        grows = f"; but it wanted {units.size(wanted)} already: does it grow from step to step?"
        notes.append(f"it would have needed {said}{grows if wanted > one.peak.total_bytes else ''}")
    if failed is not None and failed.device_free_bytes is not None:
        notes.append(
            f"{units.size(failed.allocated_bytes)} were allocated and {units.size(failed.device_free_bytes)} free "
            f"when {units.size(failed.asked_bytes)} more were asked for"
        )
    return tuple(notes)


def outcome(found: MemoryReport) -> int:
    """The exit code: 0 recorded, 130 stopped by the user; raises what stood in the way."""
    if found.status not in (OK, INTERRUPTED):
        raise FlopwiseError(f"{found.label}: {found.status}: {found.reason}", found.hint)
    return 130 if found.status == INTERRUPTED else 0
