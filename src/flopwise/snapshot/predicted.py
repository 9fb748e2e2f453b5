"""A dry run in the words of a memory report: the same answers, before anything is run."""

import numpy as np
import numpy.typing as npt

from flopwise.predict.forecast import as_prediction
from flopwise.predict.shapes.memory import without_layer
from flopwise.records.dry_run import TOLD, DryRun, LiveTensor
from flopwise.snapshot.answers import (
    PREDICTED,
    DeviceMemory,
    Growth,
    LargeAllocation,
    MemoryReport,
    Moment,
    OpBytes,
    SavedTensor,
    TimelineLine,
    by_op,
)
from flopwise.snapshot.report import LARGEST, POINTS
from flopwise.snapshot.saved import named, saved_blocks
from flopwise.snapshot.timeline import thinned
from flopwise.spec.workload import Workload
from flopwise.work.operation import TEMPORARY

NO_GROWTH = Growth(steps=0, found_by="", start_bytes=(), bytes_per_step=None, leaks_sought=False, leaks=())


def predicted_report(run: DryRun, workload: Workload) -> MemoryReport:
    """What `memory` would say of the step if it went as the dry run did; moments are ops, since nothing has a time."""
    totals = np.array(list(run.live.values()), dtype=np.int64).sum(axis=0)
    most = max(phase.reserved_bytes for phase in run.memory)
    kept = [_saved(tensor) for tensor in run.saved]
    device = DeviceMemory(
        device=0,
        events=len(run.ops),
        allocations=len(run.largest),
        before_bytes=run.moments[0].total_bytes,
        known_share=1.0,
        peak=_moment(run, run.peak_op, dict(run.peak.owners), most),
        peak_reserved_bytes=most,
        end=_moment(run, len(run.ops) - 1, dict(run.moments[-1].owners), most),
        phases={phase.phase: phase.peak_bytes for phase in run.memory},
        largest=_largest(run.largest),
        growth=NO_GROWTH,
        ooms=(),
        timeline=_line(run, totals, most),
        notes=run.notes,
        temporary=_temporary(run.largest) if len(run.largest) < TOLD else (),  # else the small ones are missing
        saved=saved_blocks(kept),
        named=named(workload, kept),
        exact=True,
    )
    return MemoryReport(
        path="", devices=(device,), label=run.workload, where=run.architecture, obtained=PREDICTED,
        predictions=(as_prediction(run),),
    )  # fmt: skip


def _moment(run: DryRun, op: int, owners: dict[str, int], reserved: int) -> Moment:
    allocated = sum(owners.values())
    return Moment(
        event=op,
        time_us=None,
        phase=run.ops[op].phase,
        allocated_bytes=allocated,
        reserved_bytes=max(reserved, allocated),
        requested_bytes=allocated,
        owners=dict(sorted(owners.items(), key=lambda pair: -pair[1])),
    )


def _saved(tensor: LiveTensor) -> SavedTensor:
    return SavedTensor(
        bytes=tensor.bytes, owner=tensor.owner, module=tensor.module, op=tensor.op, saved_by="", shape=tensor.shape,
        dtype=tensor.dtype,
    )  # fmt: skip


def _largest(tensors: tuple[LiveTensor, ...]) -> tuple[LargeAllocation, ...]:
    """Those of one kind in all layers are one row."""
    kinds: dict[tuple[object, ...], list[LiveTensor]] = {}
    for t in tensors:
        kinds.setdefault((t.bytes, t.owner, t.op, without_layer(t.module), t.shape), []).append(t)
    return tuple(
        LargeAllocation(
            bytes=alike[0].bytes,
            count=len(alike),
            requested_bytes=alike[0].bytes,
            owner=alike[0].owner,
            phase=alike[0].phase or "before the step",
            stack="",
            module=alike[0].module,
            op=alike[0].op,
            shape=alike[0].shape,
            dtype=alike[0].dtype,
        )
        for alike in list(kinds.values())[:LARGEST]
    )


def _temporary(tensors: tuple[LiveTensor, ...]) -> tuple[OpBytes, ...]:
    kinds: dict[tuple[str, str], list[int]] = {}
    for t in tensors:
        if t.owner == TEMPORARY:
            kinds.setdefault((t.op, t.dtype), []).append(t.bytes)
    return by_op(kinds)


def _line(run: DryRun, totals: npt.NDArray[np.int64], reserved: int) -> TimelineLine:
    names = ["backward" if op.phase == "recompute" else op.phase for op in run.ops]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    kept = thinned(totals, POINTS, np.array([numbers[name] for name in names], dtype=np.int64)).tolist()
    return TimelineLine(
        event=tuple(kept),
        time_us=None,
        phase=tuple(run.ops[op].phase for op in kept),
        reserved_bytes=(reserved,) * len(kept),
        owners={owner: tuple(values[op] for op in kept) for owner, values in run.live.items()},
    )
