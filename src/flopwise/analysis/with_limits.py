"""What a waterfall needs beside the trace: the machine's limits, and the step's work where its workload is known."""

import msgspec

from flopwise import units
from flopwise.analysis.computing import KnownWork
from flopwise.analysis.explained import Explained
from flopwise.analysis.explanation import Explanation
from flopwise.analysis.power_cap import held_clock
from flopwise.analysis.waterfall import waterfall
from flopwise.predict.machine import Machine, find_ceilings
from flopwise.predict.prediction import predict_quickly
from flopwise.records.run import STEP, Telemetry
from flopwise.spec.gpu import Gpu, find_gpu
from flopwise.spec.gpu import gpu as gpu_named
from flopwise.spec.workload import Workload

MOST_APART = 0.02  # FLOPs of a workload and of a trace that are taken for the same


def with_waterfall(
    found: Explanation,
    part: Explained,
    workload: Workload | None = None,
    gpu: str | None = None,
    telemetry: Telemetry | None = None,
) -> Explanation:
    """The explanation with its waterfall; a note where the limits of the trace's GPU are not known.

    `workload`: what was run, where that is known. `gpu` names the machine of a trace that does not. `telemetry`: of the
    step without the profiler.
    """
    machine = gpu_named(gpu) if gpu else find_gpu(found.gpu)
    limits = find_ceilings(machine) if machine is not None else None
    if machine is None or limits is None:
        unknown = f"the limits of '{found.gpu}' are not known" if found.gpu else "the trace names no GPU"
        return msgspec.structs.replace(found, notes=(*found.notes, f"no waterfall: {unknown}; --gpu names one"))
    itself = find_gpu(found.gpu)
    if itself is not None and itself.name != machine.name:
        other = f"the trace is of {itself.title}; the limits in the waterfall are those of {machine.title}"
        found = msgspec.structs.replace(found, notes=(*found.notes, other))
    alone = found.untraced_idle
    made = waterfall(
        part,
        limits,
        machine,
        known=known_work(workload, machine) if workload is not None else None,
        untraced=(found.host_ns[STEP], alone) if alone is not None else None,
    )
    if (held := held_clock(telemetry)) is not None:
        slow = f"the power cap held the clock at {held[0]:.0f} of {held[1]} MHz: 'matmul: other' and attention hold what it took"
        made = msgspec.structs.replace(made, notes=(*made.notes, slow))
    return msgspec.structs.replace(found, waterfall=made)


def with_waterfall_of(found: Explanation, part: Explained, workload: Workload, gpu: str | None = None) -> Explanation:
    """The same by a workload that is only said to be the trace's: if their FLOPs differ, it is not, and the trace alone tells."""
    alone, by_workload = with_waterfall(found, part, None, gpu), with_waterfall(found, part, workload, gpu)
    traced, said = (one.waterfall.mfu if one.waterfall else None for one in (alone, by_workload))
    if traced is None or said is None or abs(said / traced - 1) <= MOST_APART:
        return by_workload
    note = f"{workload.label()} does {units.percent(said / traced - 1)} more FLOPs than the trace: left out of the waterfall"
    return msgspec.structs.replace(alone, notes=(*alone.notes, note))


def known_work(workload: Workload, gpu: Gpu) -> KnownWork | None:
    """What a step must do, if that is known at once; None: the trace alone says it."""
    found = predict_quickly(workload, Machine(gpu=gpu))
    if found is None:
        return None
    return KnownWork(ops=tuple(found.kernels), model_flops=float(found.useful_flops), causal=True)
