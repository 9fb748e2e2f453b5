"""Which probes make a machine's steps predictable: about a minute of them."""

import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.nn.functional as F

from flopwise.capture.host_probes import CountsOf, HostTimer, host_probe_count, probe_compiled
from flopwise.capture.probes import (
    Run,
    Stopwatch,
    probe_attention,
    probe_backward_matmul,
    probe_matmul,
    probe_memory,
    probe_vectors,
)
from flopwise.capture.step import Step, captured
from flopwise.records.ceilings import Probe
from flopwise.records.run import STEP, Ran

Shapes = tuple[tuple[int, int, int, int], ...]

# Rows of activations times the widths that models have, in all three orders that a linear layer's passes need.
_SMALL = ((768, 768), (768, 3072), (1024, 4096), (1280, 5120), (1600, 1600), (1600, 6400))
_LAYERS = (*_SMALL, (2560, 2560), (2560, 10240), (4096, 4096), (4096, 14336))
_WIDTHS = (*_LAYERS, (2048, 50304))
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
BACKENDS = ("flash", "cudnn", "triton")  # of attention, besides the one that PyTorch picks
CPU_ATTENTIONS: Shapes = ((1, 4, 64, 16), (1, 4, 256, 64))
GPU_SIZES: tuple[int, ...] = tuple(1 << power for power in (14, 17, *range(20, 32)))
# (rows, outs, ins) of the layers whose products in the backward pass are probed separately.
GPU_LAYERS: tuple[tuple[int, int, int], ...] = tuple(
    (rows, pair[0], pair[1]) for rows in _ROWS for sides in _LAYERS for pair in dict.fromkeys((sides, sides[::-1]))
)
_REPEATS = 200


def probes(device: torch.device, counts_of: CountsOf) -> Iterator[Probe]:
    """Every probe of this device, small ones first."""
    watch = Stopwatch(device)
    if device.type == "cuda":
        host = HostTimer(device)
        for some in (
            probe_launches(device),
            probe_compiled(device),
            *(probe_memory(watch, sizes) for sizes in (GPU_SIZES[:8], GPU_SIZES[8:])),
            probe_vectors(watch),
            probe_attention(watch, ("fp32", "bf16"), GPU_ATTENTIONS),  # fp16 takes bf16's time, within 3 % on an H200
            *(probe_attention(watch, ("bf16",), GPU_ATTENTIONS, backend) for backend in BACKENDS),
            *(probe_matmul(watch, (dtype,), GPU_MATMULS) for dtype in ("fp32", "tf32", "bf16", "fp16")),
            probe_backward_matmul(watch, ("tf32",), GPU_LAYERS),
        ):
            host.round()
            yield from some
        yield from host.probes(counts_of)
    else:
        yield from probe_memory(watch, tuple(2**power for power in range(12, 27, 2)))
        yield from probe_attention(watch, ("fp32",), CPU_ATTENTIONS)
        yield from probe_matmul(watch, ("fp32",), CPU_MATMULS)


def probe_count(device: torch.device) -> int:
    """How many probes there will be."""
    if device.type == "cuda":
        host = 6 + 6 + 1 + host_probe_count()
        memory = 32 * len(GPU_SIZES) + sum(size >= 1 << 21 for size in GPU_SIZES)
        return (
            host + memory + 2 * (2 + len(BACKENDS)) * len(GPU_ATTENTIONS) + 4 * len(GPU_MATMULS) + 2 * len(GPU_LAYERS)
        )
    return 18 * 8 + 2 * len(CPU_ATTENTIONS) + len(CPU_MATMULS)


def probe_launches(device: torch.device) -> Iterator[Probe]:
    """The costs around a kernel: the host's part of a view, the time from launch to start, a graph's gaps."""
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

    yield from _probe_switch(device)
    y = torch.rand(8, device=device, requires_grad=True)
    out, gradient = y.sin(), torch.ones_like(y)
    start_ns = _host_ns(lambda: torch.autograd.grad(out, y, gradient, retain_graph=True)) - _host_ns(gradient.sin)
    yield Probe(what="host:start", ns=max(0.0, start_ns))


def _probe_switch(device: torch.device) -> Iterator[Probe]:
    """How much longer a kernel takes after a different kernel, and how much longer or shorter in a CUDA graph."""
    runs, watch = different_kernels(device), Stopwatch(device)

    def all_of_them() -> None:
        for run in runs:
            run()

    together_ns = watch.ns(all_of_them) / len(runs)
    yield Probe(what="switch", ns=max(0.0, together_ns - sum(watch.ns(run) for run in runs) / len(runs)))
    times = _REPEATS // len(runs)

    def many() -> None:
        for _ in range(times):
            all_of_them()

    replay = captured(Step(phases={STEP: many}, ran=lambda: Ran(device=str(device))), device).phases[STEP]
    yield Probe(what="graph gap", ns=watch.ns(replay) / (times * len(runs)) - together_ns)


def different_kernels(device: torch.device) -> list[Run]:
    """Small operations of one kernel each, all different."""
    x = torch.rand(64, 1024, device=device)
    half, gain, column = x.bfloat16(), torch.rand(1024, device=device), torch.rand(64, 1, device=device)
    weight = torch.rand(1024, 1024, device=device, dtype=torch.bfloat16)
    index, turned = torch.randint(64, (64,), device=device), half.view(64, 16, 64).transpose(0, 1)
    runs: list[Run] = [
        lambda: F.rms_norm(x, (1024,), gain),
        lambda: x.bfloat16(),
        lambda: torch.mm(half, weight),
        lambda: half.float(),
        lambda: torch.mul(x, column),
        lambda: torch.sub(x, x),
        lambda: torch.cat((half, half), -1),
        lambda: turned.contiguous(),
        lambda: torch.add(x, half),
        lambda: F.silu(half),
        lambda: torch.mul(half, half),
        lambda: torch.sum(x, -1),
        lambda: torch.softmax(x, -1),
        lambda: torch.exp(x),
        lambda: F.embedding(index, x),
        lambda: torch.neg(x),
    ]
    return runs


def _host_ns(run: Run) -> float:
    for _ in range(10):
        run()
    begun = time.perf_counter_ns()
    for _ in range(_REPEATS):
        run()
    return (time.perf_counter_ns() - begun) / _REPEATS
