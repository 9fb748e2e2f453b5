"""Steps made up for the rules: a trace's answers from a few kernels, and points with the clocks that a rule asks for."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from flopwise.advice.facts import Facts
from flopwise.analysis.attention import AttentionParts
from flopwise.analysis.details import details
from flopwise.analysis.explanation import Explanation, Kernel, Part, Share, explain_trace
from flopwise.analysis.idle import BETWEEN, CAUSES, LATE_LAUNCH, SYNCHRONISATION, Idle
from flopwise.analysis.traced_steps import traced_steps
from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.prediction import predict
from flopwise.predict.step_time import StepTime
from flopwise.records import waterfall as words
from flopwise.records.ceilings import Ceilings
from flopwise.records.run import PhaseTimes, Point
from flopwise.records.waterfall import Waterfall, WaterfallPart
from flopwise.spec.gpu import gpu
from flopwise.spec.workload import Sampling, Trial, Workload, workload
from flopwise.trace.read import read_trace
from flopwise.work.matmul_precision import matmul_precision

MS = 1_000_000.0
FIXTURES = Path(__file__).parent.parent / "trace" / "fixtures"
H200 = gpu("h200")
SGEMM, BF16 = "ampere_sgemm_128x64_nn", "nvjet_sm90_tst_96x128_64x6_2x1_v_bz_NNN"
NO_PARTS = AttentionParts(softmax_ns=0.0, matmul_ns=0.0, fused_ns=0.0)


def explained(
    *work: tuple[str, str, str, str, float, float],
    step: float = 100 * MS,
    late: float = 0.0,
    sync: float = 0.0,
    waits: Mapping[str, float] | None = None,
    **more: Any,
) -> Explanation:
    """`work` is (phase, class, module, kernel, ns, count) of one step; what is left of the step is idle between kernels.

    `waits`: idle time of other causes."""
    total = sum(row[4] for row in work) or 1.0
    causes = dict.fromkeys(CAUSES, 0) | {LATE_LAUNCH: int(late), SYNCHRONISATION: int(sync)}
    causes |= {cause: int(ns) for cause, ns in (waits or {}).items()}
    causes[BETWEEN] = int(max(0.0, step - total - sum(causes.values())))

    def share(column: int) -> tuple[Share, ...]:
        names = dict.fromkeys(str(row[column]) for row in work)
        rows = {name: [row for row in work if row[column] == name] for name in names}
        return tuple(
            Share(
                name=n, gpu_ns=sum(r[4] for r in rs), share=sum(r[4] for r in rs) / total, count=sum(r[5] for r in rs)
            )
            for n, rs in rows.items()
        )

    phase_classes: dict[str, dict[str, float]] = {}
    precision: dict[str, float] = {}
    for phase, kind, _, name, ns, _count in work:
        classes = phase_classes.setdefault(phase, {})
        classes[kind] = classes.get(kind, 0.0) + ns
        if kind == "matmul" and (found := matmul_precision(name)):
            precision[found.precision] = precision.get(found.precision, 0.0) + ns
    matmul = sum(precision.values()) or 1.0
    words = {"path": "made.json", "source": "kineto", "gpu": "NVIDIA H200", "steps_found_by": "ranges", "verdict": ""}
    none = {"top_forward": None, "top_forward_backward": None, "matmul_share": {}, "coverage": {}, "notes": ()}
    given: dict[str, Any] = {
        "steps": 1,
        "steady_steps": 1,
        "gpu_ns": total,
        "busy_ns": total,
        "window_ns": step,
        "idle": Idle(total_ns=sum(causes.values()), by_cause_ns=causes, n_gaps=1),
        "phases": share(0),
        "classes": share(1),
        "phase_classes": phase_classes,
        "phase_class_modules": tuple(
            Part(phase=p, kind=k, module=m, gpu_ns=ns, share=ns / total, count=c) for p, k, m, _, ns, c in work
        ),
        "modules": share(2),
        "kernels": tuple(
            Kernel(name=n, kind=k, gpu_ns=ns, share=ns / total, count=c, mean_ns=ns / c) for _, k, _, n, ns, c in work
        ),
        "matmul_precision": {name: ns / matmul for name, ns in precision.items()},
        "attention": NO_PARTS,
        "attention_backward": NO_PARTS,
        "launches": sum(row[5] for row in work),
        "bound": "gpu",
        "launch_bound": False,
    }
    return Explanation(**(words | none | given | more))


def seen(*work: tuple[str, str, str, str, float, float], **more: Any) -> Facts:
    """A trace of unknown origin on an H200; `facts` besides."""
    facts = more.pop("facts", {})
    return Facts(**({"explanation": explained(*work, **more), "gpu": H200} | facts))


def point(
    target: str = "small", *, wall: float, launch: float, busy: float, fields: Any = None, **options: Any
) -> Point:
    trial = Trial(workload=workload(target, **options), sampling=Sampling())
    step = PhaseTimes(
        phase="step",
        wall_ns=(int(wall),) * 4,
        launch_ns=(int(launch),) * 4,
        gpu_ns=(int(busy),) * 4,
        gpu_held=(True,) * 4,
    )
    return Point(**({"key": "k", "trial": trial, "status": "ok", "phases": (step,)} | (fields or {})))


def known(target: str = "small", *, memory_bytes: int | None = None, **options: Any) -> Facts:
    """A workload measured exactly as the model predicts it, without a trace; `memory_bytes`: of the GPU."""
    time = predicted(target, **options)
    measured = point(target, wall=time.wall_ns, launch=time.host_ns, busy=time.gpu_ns, **options)
    gpu_there = msgspec.structs.replace(H200, memory_bytes=memory_bytes or H200.memory_bytes)
    return Facts(point=measured, ceilings=ceilings(), gpu=gpu_there)


@cache
def _step_time(asked: bytes) -> StepTime:
    work = msgspec.json.decode(asked, type=Workload)
    return predict(work).time_with(ceilings())


def predicted(target: str = "small", **options: Any) -> StepTime:
    """The step by the uncorrected model."""
    return _step_time(msgspec.json.encode(workload(target, **options)))


def ceilings() -> Ceilings:
    return from_datasheet(H200)


def waterfall(step: float, **parts: float) -> Waterfall:
    """Parts by the names of the constants in analysis.waterfall."""
    rows = tuple(
        WaterfallPart(name=getattr(words, name), ns=ns, share=ns / step, how="measured") for name, ns in parts.items()
    )
    return Waterfall(step_ns=step, measured_by="the trace", parts=rows, mfu=None, hfu=None, roofline_share=None)


def fixture(name: str, **more: Any) -> Facts:
    trace = read_trace(FIXTURES / name)
    return Facts(explanation=explain_trace(trace), details=details(traced_steps(trace)), gpu=H200, **more)


def with_explanation(facts: Facts, **changes: Any) -> Facts:
    assert facts.explanation is not None
    return msgspec.structs.replace(facts, explanation=msgspec.structs.replace(facts.explanation, **changes))
