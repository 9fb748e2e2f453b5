"""What to probe on a machine so that its steps can be predicted: about a minute on a GPU, less on a CPU."""

import time
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

from flopwise.capture.build import build_step
from flopwise.capture.clock import CudaClock
from flopwise.capture.dry_run import dry_run
from flopwise.capture.probes import Run, Stopwatch, probe_attention, probe_matmul, probe_memory
from flopwise.capture.step import Step, captured
from flopwise.ceilings import Probe
from flopwise.cost.step import account_step
from flopwise.records import STEP, Ran
from flopwise.spec.workload import Workload, workload
from flopwise.work import OPTIMIZER

Shapes = tuple[tuple[int, int, int, int], ...]

# Rows of activations by the widths that models have, all three ways round that a linear layer's passes need.
_WIDTHS = (
    (768, 768), (768, 3072), (1024, 4096), (1280, 5120), (1600, 1600), (1600, 6400), (2560, 2560), (2560, 10240),
    (4096, 4096), (4096, 14336), (2048, 50304),
)  # fmt: skip
_ROWS = (512, 2048, 8192)
GPU_MATMULS: Shapes = tuple(
    shape
    for rows in _ROWS
    for narrow, wide in _WIDTHS
    for shape in dict.fromkeys(((1, rows, wide, narrow), (1, rows, narrow, wide), (1, wide, narrow, rows)))
) + tuple(
    (batch, *shape)
    for batch in (16, 48, 128)
    for context in (256, 1024)
    for shape in ((context, context, 64), (context, 64, context), (context, context, 128))
)
CPU_MATMULS: Shapes = ((1, 64, 64, 64), (1, 256, 256, 256), (1, 512, 1024, 256), (1, 1024, 1024, 1024), (8, 64, 64, 16))
GPU_ATTENTIONS: Shapes = tuple(
    (batch, heads, context, width)
    for batch, heads, context in ((1, 8, 256), (4, 12, 512), (4, 25, 512), (4, 16, 1024), (2, 16, 4096), (1, 16, 16384))
    for width in (64, 128)
)
CPU_ATTENTIONS: Shapes = ((1, 4, 64, 16), (1, 4, 256, 64))
_REPEATS, _HOST_SAMPLES = 200, 40


def probes(device: torch.device) -> Iterator[Probe]:
    """Every probe that tells something about this device, small ones first."""
    watch = Stopwatch(device)
    if device.type == "cuda":
        yield from probe_launches(device)
        yield from probe_host(device)
        yield from probe_compiled(device)
        yield from probe_memory(watch, tuple(2**power for power in range(14, 32)))
        yield from probe_attention(watch, ("fp32", "bf16", "fp16"), GPU_ATTENTIONS)
        yield from probe_matmul(watch, ("fp32", "tf32", "bf16", "fp16"), GPU_MATMULS)
    else:
        yield from probe_memory(watch, tuple(2**power for power in range(12, 27, 2)))
        yield from probe_attention(watch, ("fp32",), CPU_ATTENTIONS)
        yield from probe_matmul(watch, ("fp32",), CPU_MATMULS)


def how_many(device: torch.device) -> int:
    """How many probes there will be."""
    if device.type == "cuda":
        return 12 + 20 * 18 + 2 * 3 * len(GPU_ATTENTIONS) + 4 * len(GPU_MATMULS)
    return 12 * 8 + 2 * len(CPU_ATTENTIONS) + len(CPU_MATMULS)


def probe_launches(device: torch.device) -> Iterator[Probe]:
    """What lies around a kernel: the host's part of a view, the way from the launch to the start, a graph's gaps."""
    x = torch.zeros(64, device=device)
    yield Probe(what="host:view", ns=_host_ns(lambda: x.view(8, 8)))
    launch_ns = _host_ns(lambda: x.add_(1))
    yield Probe(what="host:kernel", ns=launch_ns)
    torch.cuda.synchronize(device)
    alone = []
    for _ in range(_REPEATS):
        begun = time.perf_counter_ns()
        x.add_(1)
        torch.cuda.synchronize(device)
        alone.append(time.perf_counter_ns() - begun)
    kernel_ns = Stopwatch(device).ns(lambda: x.add_(1))
    yield Probe(what="latency", ns=max(0.0, median(alone) - launch_ns - kernel_ns))

    def many() -> None:
        for _ in range(_REPEATS):
            x.add_(1)

    y = torch.rand(256, 256, device=device, dtype=torch.bfloat16)
    both = partial(torch.mul, y, 2.0, out=torch.empty_like(y)), partial(torch.matmul, y, y)
    alternating_ns = Stopwatch(device).ns(lambda: [run() for run in both])
    yield Probe(what="switch", ns=max(0.0, alternating_ns - sum(Stopwatch(device).ns(run) for run in both)))
    replay = captured(Step(phases={STEP: many}, ran=lambda: Ran(device=str(device))), device).phases[STEP]
    yield Probe(what="graph gap", ns=Stopwatch(device).ns(replay) / _REPEATS - kernel_ns)


def probe_host(device: torch.device) -> Iterator[Probe]:
    """What the host takes to launch an operation, phase by phase: a model too small for anything else to matter."""
    x = torch.rand(8, device=device, requires_grad=True)
    y = x.sin()
    gradient = torch.ones_like(y)
    start_ns = _host_ns(lambda: torch.autograd.grad(y, x, gradient, retain_graph=True)) - _host_ns(gradient.sin)
    yield Probe(what="host:start", ns=max(0.0, start_ns))
    tiny = partial(workload, "tiny", batch=1, context=16, precision="bf16")
    for chosen, named in (
        (tiny(phase="train", optimizer="adamw-loop"), {p: p for p in ("forward", "backward", "optimizer")}),
        (tiny(phase="train", optimizer="foreach"), {"lists": "optimizer"}),
        (tiny(phase="forward"), {"inference": "forward"}),
    ):
        launch_ns, counts = _launch_ns(chosen, device), _counts(chosen)
        for name, phase in named.items():
            yield Probe(what=f"host:{name}", shape=counts[phase], ns=launch_ns[phase])


def probe_compiled(device: torch.device) -> Iterator[Probe]:
    """What the host takes to call a compiled graph, beyond its one kernel; nothing where torch.compile cannot run."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    try:
        run = torch.compile(lambda x: (x.sin() + 1).cos())
        run(x)
    except Exception:  # noqa: BLE001  (no compiler on this machine, say: whatever it is, only this probe is lost)
        return
    yield Probe(what="host:compiled", ns=max(0.0, _host_ns(lambda: run(x)) - _host_ns(lambda: x.sin())))


def _counts(chosen: Workload) -> dict[str, tuple[int, ...]]:
    """By phase, the loss with forward: operations, views, kernels beyond an operation's first, tensors read by lists."""
    counts = {phase: [0, 0, 0, 0] for phase in ("forward", "backward", "optimizer")}
    for op in dry_run(chosen).ops:
        if op.phase in ("forward", "loss", "backward", "optimizer"):
            count = counts["forward" if op.phase == "loss" else op.phase]
            count[0 if op.kernels else 1] += 1
            count[2] += max(0, op.kernels - 1)
    for op in account_step(chosen, None).ops:
        if op.phase == "optimizer" and op.kind == OPTIMIZER:
            counts["optimizer"][3] += len(op.reads)
    return {phase: tuple(count) for phase, count in counts.items()}


def _launch_ns(chosen: Workload, device: torch.device) -> dict[str, float]:
    clock = CudaClock(build_step(chosen, device).phases, device, flush_l2=False)
    samples = [clock.sample() for _ in range(_HOST_SAMPLES)][_HOST_SAMPLES // 4 :]
    launch_ns = {phase: float(median(s[phase].launch_ns or 0 for s in samples)) for phase in samples[0]}
    launch_ns.setdefault("forward", launch_ns[STEP])  # of a step that has no other phase
    launch_ns["forward"] += launch_ns.pop("loss", 0.0)
    return launch_ns


def _host_ns(run: Run) -> float:
    for _ in range(10):
        run()
    begun = time.perf_counter_ns()
    for _ in range(_REPEATS):
        run()
    return (time.perf_counter_ns() - begun) / _REPEATS
