"""A dry run as a memory report: the same answers, before anything is run."""

from typing import Any

import numpy as np
import numpy.typing as npt

from flopwise.predict.shapes.memory import without_layer
from flopwise.records.prediction import LARGEST_TENSORS, DryRun, LiveTensor
from flopwise.snapshot import answers
from flopwise.snapshot.answers import (
    DeviceMemory,
    LargeAllocation,
    MemoryReport,
    Moment,
    OpBytes,
    SavedTensor,
    TimelineLine,
)
from flopwise.snapshot.report import LARGEST, POINTS
from flopwise.snapshot.saved import named, saved_blocks
from flopwise.snapshot.timeline import thinned
from flopwise.spec.workload import Workload
from flopwise.work.operation import TEMPORARY

NO_GROWTH = answers.Growth(steps=0, found_by="", start_bytes=(), bytes_per_step=None, leaks_sought=False, leaks=())


def predicted_report(run: DryRun, workload: Workload) -> MemoryReport:
    """What `memory` would say of the step if it went as the dry run did; moments are ops, since nothing has a time."""
    totals = np.array(list(run.live.values()), dtype=np.int64).sum(axis=0)
    most = max(phase.reserved_bytes for phase in run.phases)
    kept = [SavedTensor(**_fields(tensor), saved_by="") for tensor in run.saved]
    device = DeviceMemory(
        device=0,
        events=len(run.ops),
        allocations=len(run.largest),
        before_bytes=run.moments[0].total_bytes,
        known_share=1.0,
        peak=_moment(run, run.peak_op, dict(run.peak.owners), most),
        peak_reserved_bytes=most,
        end=_moment(run, len(run.ops) - 1, dict(run.moments[-1].owners), most),
        phases={phase.phase: phase.peak_bytes for phase in run.phases},
        largest=_largest(run.largest),
        growth=NO_GROWTH,
        ooms=(),
        timeline=_line(run, totals, most),
        notes=run.notes,
        temporary=_temporary(run.largest),
        saved=saved_blocks(kept),
        named=named(workload, kept),
        exact=True,
    )
    return MemoryReport(
        path="",
        devices=(device,),
        label=run.workload,
        where=run.architecture,
        obtained=answers.PREDICTED,
        predictions=(run.memory(),),
    )


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


def _largest(tensors: tuple[LiveTensor, ...]) -> tuple[LargeAllocation, ...]:
    """Those of one kind in all layers are one row."""
    kinds: dict[tuple[object, ...], list[LiveTensor]] = {}
    for t in tensors:
        kinds.setdefault((t.bytes, t.owner, t.op, without_layer(t.module), t.shape), []).append(t)
    return tuple(
        LargeAllocation(
            **_fields(alike[0]),
            count=len(alike),
            requested_bytes=alike[0].bytes,
            phase=alike[0].phase or "before the step",
            stack="",
        )
        for alike in list(kinds.values())[:LARGEST]
    )


def _fields(tensor: LiveTensor) -> dict[str, Any]:
    return {name: getattr(tensor, name) for name in ("bytes", "owner", "module", "op", "shape", "dtype")}


def _temporary(tensors: tuple[LiveTensor, ...]) -> tuple[OpBytes, ...]:
    if len(tensors) == LARGEST_TENSORS:
        return ()  # the small ones are missing
    kinds: dict[tuple[str, str], list[int]] = {}
    for t in tensors:
        if t.owner == TEMPORARY:
            kinds.setdefault((t.op, t.dtype), []).append(t.bytes)
    return answers.by_op(kinds)


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
