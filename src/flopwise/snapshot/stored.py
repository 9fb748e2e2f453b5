"""The report of a stored run of `memory`, from its files alone."""

import msgspec

from flopwise import units
from flopwise.errors import FlopwiseError
from flopwise.predict.fit import memory_levers
from flopwise.predict.machine import gpu_of
from flopwise.records.memory import (
    StoredPredictions,
    knowledge_path,
    predictions_path,
    read_knowledge,
    read_predictions,
)
from flopwise.records.rank_rows import ranks_line, update_line
from flopwise.records.run import OOM, Point
from flopwise.snapshot.answers import DeviceMemory, MemoryReport
from flopwise.snapshot.read import read_snapshot
from flopwise.snapshot.report import report
from flopwise.spec.rank_share import rank_share
from flopwise.store import StoredRun
from flopwise.store.files import MEMORY
from flopwise.store.sums import checked_file


def stored_report(run: StoredRun, stacks: bool = False) -> MemoryReport:
    """What was recorded, and what was predicted of it; nothing is run."""
    point = next((p for p in run.points if p.memory_file), run.points[0] if run.points else None)
    if point is None or run.header.kind != "memory":
        raise FlopwiseError(f"the run {run.header.id} has no memory snapshot", "record one: flopwise memory WORKLOAD")
    workload, there = point.trial.workload, point.environment
    path = checked_file(run.path, MEMORY, point.memory_file or f"{point.key}.pickle")
    for beside in (predictions_path(path), knowledge_path(path)):
        checked_file(run.path, MEMORY, beside.name)
    predicted = read_predictions(path)
    found = MemoryReport(path=str(run.path), devices=())
    if point.memory_file:
        found = report(read_snapshot(path), stacks, read_knowledge(path), rank_share(workload))
    return msgspec.structs.replace(
        found,
        path=str(path) if point.memory_file else str(run.path),
        label=workload.label(),
        where=point.trial.device if there is None else there.gpu.name if there.gpu else "the CPU",
        status=point.status,
        reason=point.reason,
        hint=point.hint,
        predictions=predicted.predictions,
        levers=memory_levers(workload, gpu_of(there)),
        notes=(
            *run.left_out,
            *filter(None, (ranks_line(point), update_line(point))),
            *_notes(point, found.devices),
            *_needed(point, predicted, found.devices),
            *predicted.notes,
        ),
    )


def _notes(point: Point, devices: tuple[DeviceMemory, ...]) -> tuple[str, ...]:
    if point.environment is None or not devices:
        return ()
    if point.environment.gpu is None:
        resized = ("weights that fsdp2 has let go are still counted: it resizes them, which is not seen on the CPU",)
        return (
            *(resized if "fsdp2" in point.trial.workload.recipe.parallel else ()),
            "on the CPU every tensor is an allocation of exactly its bytes: no rounding, no workspace, nothing reserved; "
            "what a kernel takes for itself is not seen, nor are an optimizer's step counts",
        )
    if not point.memory:
        return ()
    alone, watched = max(m.peak_bytes for m in point.memory), devices[0].peak.allocated_bytes
    note = f"a step that was not recorded had a peak of {units.size(alone)}; the recorded ones {units.size(watched)}"
    if alone > watched:  # no owner is known for it: the trace has the request only, once a block was freed
        note += f": {units.size(alone - watched)} less, most likely the rounding of blocks that were freed since"
    return (note,)


def _needed(point: Point, predicted: StoredPredictions, devices: tuple[DeviceMemory, ...]) -> tuple[str, ...]:
    """Of a workload that ran out of memory: what it would have needed, and what there was."""
    if point.status != OOM:
        return ()
    notes = []
    failed = next((failure for device in devices for failure in reversed(device.ooms)), None)
    wanted = failed.allocated_bytes + failed.asked_bytes if failed is not None else 0
    if predicted.predictions:
        one = predicted.predictions[0]
        grows = f"; but it wanted {units.size(wanted)} already: does it grow from step to step?"
        more = grows if wanted > one.peak_bytes else ""
        notes.append(f"it would have needed {units.size(one.peak_bytes)} at its peak, by the {one.source}{more}")
    if failed is not None and failed.device_free_bytes is not None:
        notes.append(
            f"{units.size(failed.allocated_bytes)} were allocated and {units.size(failed.device_free_bytes)} free "
            f"when {units.size(failed.asked_bytes)} more were asked for"
        )
    return tuple(notes)
