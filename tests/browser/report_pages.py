"""Reports to look at: a real trace with a waterfall and findings made by hand, and one whose every name is hostile."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec

from flopwise.analysis.reach import reach
from flopwise.api.report import gather
from flopwise.records.finding import HIGH, Finding
from flopwise.records.waterfall import (
    ATTENTION_PART,
    IDEAL,
    IDLE_LAUNCH,
    IDLE_SYNCHRONISATION,
    MATMUL_PRECISION,
    MATMUL_SHAPE,
    MEMORY_BOUND,
    OPTIMIZER_PART,
    Waterfall,
    WaterfallPart,
)

FIXTURES = Path(__file__).parents[1] / "trace" / "fixtures"
NAIVE = FIXTURES / "h200-small-fp32-naive-2steps.kineto.json.gz"
COMPILED = FIXTURES / "h200-small-bf16-compiled-2steps.kineto.json.gz"
HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>&amp;\'`|[x](javascript:1)\u202e'


def waterfall(why=""):
    shares = {
        IDEAL: 0.14, MATMUL_SHAPE: 0.05, MATMUL_PRECISION: 0.12, ATTENTION_PART: 0.06, MEMORY_BOUND: 0.14,
        OPTIMIZER_PART: 0.06, IDLE_LAUNCH: 0.33, IDLE_SYNCHRONISATION: 0.10,
    }  # fmt: skip
    step = 24e6
    parts = tuple(
        WaterfallPart(name=name, ns=share * step, share=share, how="measured", why=why)
        for name, share in shares.items()
    )
    return Waterfall(
        step_ns=step, measured_by="the untraced step", parts=parts, mfu=0.14, hfu=0.14, roofline_share=0.31
    )


def findings(kernel, name="late launches"):
    return (
        Finding(
            rule="launch_bound",
            title=f"The GPU waits for the CPU: {name}",
            saving_ns=17e6,
            counted_ns=17e6,
            arithmetic="24.0 ms − 7.0 ms of GPU work = 17.0 ms",
            evidence=(f"longest kernel: {kernel}", "1843 launches a step"),
            kernels=(kernel,),
            levers={"graph": "on"},
            code="graph = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph):\n    step()",
            confidence=HIGH,
        ),
    )


def hostile_trace(path):
    """A step of two kernels, every name of it hostile."""

    def event(cat, name, ts, dur, tid, pid, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}

    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
    events = [
        event("user_annotation", HOSTILE, 0, 90, 5, 100),
        event("python_function", f"nn.Module: {HOSTILE}_0", 0, 85, 5, 100, **{"Python id": 1, "Python module id": 0}),
    ]
    for i, at in enumerate((1, 41), 1):
        ids = {"correlation": i, "External id": i}
        events += [
            event("cpu_op", "aten::mm", at, 38, 5, 100, **{"External id": i}, **shapes),
            event("cuda_runtime", "cudaLaunchKernel", at + 1, 2, 5, 100, **ids),
            event("kernel", f"gemm{i} {HOSTILE}", at + 5, 10, 7, 0, device=0, stream=7, **ids),
        ]
    device = [{"id": 0, "name": "NVIDIA H200"}]
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": device, "traceEvents": events}))
    return path


def gathered(target, why="", name="late launches"):
    """A target with a waterfall and a finding that names its longest kernel."""
    part = gather(target)
    fall, found = waterfall(why), findings(part.explanation.kernels[0].name, name)
    reached = reach(fall.step_ns, [one.counted_ns for one in found], fall, part.explanation.gpu)
    whole = msgspec.structs.replace(part.explanation, waterfall=fall, findings=found, reach=reached)
    return replace(part, explanation=whole, waterfall=fall, findings=found)


def all_drawn(page):
    """Draw every chart, also those out of sight."""
    page.evaluate("window.flopwise.drawAll()")
    page.wait_for_function("[...document.querySelectorAll('[data-chart]')].every((one) => one.dataset.ready)")
