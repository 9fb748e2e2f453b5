"""Probes of a machine's limits: operations at many sizes, each timed alone. `predict` fits ceilings to them."""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from flopwise.errors import Unsupported
from flopwise.lm.attention import attention_function
from flopwise.lm.precision import apply_fp32_matmul, torch_dtype
from flopwise.records.ceilings import (
    BACKWARD,
    COLD,
    EXPONENTIAL,
    FUSED,
    HALF,
    INDICES,
    JOINED,
    MIXED,
    RMS,
    STRIDED,
    STRIDES,
    VECTOR,
    Probe,
)
from flopwise.spec.recipe import Recipe
from flopwise.torch_private import foreach_add_, spin
from flopwise.work.operation import COPY, ELEMENTWISE, INDEX, MEMORY, NORMALISATION, OPTIMIZER, REDUCTION, SOFTMAX

Run = Callable[[], object]

_ATTENTIONS = {
    "": "sdpa",
    "flash": "sdpa-flash",
    "cudnn": "sdpa-cudnn",
    "triton": "flash",
}  # backend: the recipe's name
WIDTH = 1024  # of a row in the probes of row-wise kernels
_ROUNDS, _ROUND_NS = 3, 12e6  # long enough for the chip to settle at the clock it can hold
_MAX_RUNS = 50  # of an operation in a round
_COLD_BYTES, _COLD_TENSORS = 2**29, 512  # more than any cache holds, in so many tensors at most
_CHAIN_ROUNDS = 64  # of sixteen multiply-adds a number: its load and store are negligible
_CYCLES_PER_NS = 2.0  # of the fastest GPU clocks: a spin lasts at least as long as asked


class Stopwatch:
    """Nanoseconds per run of an operation, launches not counted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ns(self, run: Run) -> float:
        """The median of a few rounds, each of as many runs as it takes to be long enough."""
        run()
        self._wait()
        queue_ns = _queue_ns(run, 2)
        repeats = max(1, min(_MAX_RUNS, int(self._round_ns // max(1.0, self._round(run, 2, queue_ns)))))
        return median(self._round(run, repeats, queue_ns) for _ in range(_ROUNDS))

    @property
    def _round_ns(self) -> float:
        return _ROUND_NS if self.device.type == "cuda" else _ROUND_NS / 10

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _round(self, run: Run, repeats: int, queue_ns: float) -> float:
        if self.device.type != "cuda":
            return _queue_ns(run, repeats)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._wait()
        wait_ns = min(6e7, 2 * repeats * queue_ns)  # so that the GPU never waits for a launch between the events
        spin(int(wait_ns * _CYCLES_PER_NS))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        self._wait()
        return float(begin.elapsed_time(end)) * 1e6 / repeats


def _queue_ns(run: Run, repeats: int) -> float:
    begun = time.perf_counter_ns()
    for _ in range(repeats):
        run()
    return (time.perf_counter_ns() - begun) / repeats


def memory_runs(device: torch.device, n_bytes: int, half: bool = False) -> dict[str, tuple[Run, int]]:
    """By class of kernels: an operation on tensors that together have about `n_bytes`, and the bytes it moves."""
    dtype = torch.bfloat16 if half else torch.float32
    rows = max(1, n_bytes // (2 * dtype.itemsize * WIDTH))
    x = torch.rand(rows, WIDTH, device=device, dtype=dtype)
    y, other = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32 if half else torch.bfloat16)
    both = 2 * x.nbytes
    half_rows = torch.empty(rows, WIDTH // 64, 32, device=device)
    column, gain = (torch.rand(*shape, device=device, dtype=dtype) for shape in ((rows, 1), (WIDTH,)))
    turned = x.view(rows, WIDTH // 64, 64).transpose(0, 1)
    halves = [torch.rand(rows, WIDTH // 64, 32, device=device, dtype=dtype).transpose(0, 1) for _ in range(2)]
    index = torch.randint(rows, (rows,), device=device)
    sums = torch.empty(rows, device=device, dtype=dtype)
    runs: dict[str, tuple[Run, int]] = {
        ELEMENTWISE: (lambda: torch.mul(x, 2.0, out=y), both),
        STRIDED: (lambda: torch.mul(x, column, out=y), both),
        REDUCTION: (lambda: torch.sum(x, -1, out=sums), x.nbytes),
        REDUCTION + INDICES: (lambda: x.max(-1), x.nbytes),
        SOFTMAX: (lambda: torch.softmax(x, -1), both),
        NORMALISATION: (lambda: F.layer_norm(x, (WIDTH,), gain), both),
        NORMALISATION + RMS: (lambda: F.rms_norm(x, (WIDTH,), gain), both),
        ELEMENTWISE + EXPONENTIAL: (lambda: F.silu(x), both),
        COPY: (lambda: other.copy_(x), x.nbytes + other.nbytes),
        COPY + STRIDES: (lambda: turned.contiguous(), both),
        COPY + JOINED: (lambda: torch.cat(halves, -1), both),
        INDEX: (lambda: F.embedding(index, x), both),
    }
    if half:
        return {f"{name}{HALF}": run for name, run in runs.items()}
    return runs | {
        MEMORY: (lambda: y.zero_(), y.nbytes),
        INDEX + BACKWARD: (lambda: torch.ops.aten.embedding_dense_backward(x, index, rows, -1, False), both),
        ELEMENTWISE + MIXED: (lambda: torch.add(x, other, out=y), both + other.nbytes),
        ELEMENTWISE + STRIDES + MIXED: (
            lambda: torch.mul(other.view(rows, -1, 64)[..., :32], gain[:32], out=half_rows),
            other.nbytes // 2 + half_rows.nbytes,
        ),
    }


def probe_vectors(watch: Stopwatch) -> Iterator[Probe]:
    """fp32 multiply-adds out of registers, 32 MB of numbers; nothing where there is no Triton."""
    try:
        from flopwise.kernels.multiply_add import multiply_adds

        x = torch.rand(2**23, device=watch.device)
        flops = multiply_adds(x, _CHAIN_ROUNDS)
    except Exception:  # noqa: BLE001  (no Triton for this machine, for example: only this probe is lost)
        return
    yield Probe(what=VECTOR, dtype="fp32", amount=float(flops), ns=watch.ns(lambda: multiply_adds(x, _CHAIN_ROUNDS)))


def cold_runs(device: torch.device, n_bytes: int) -> dict[str, tuple[Run, int]]:
    """Elementwise work on one tensor after another, so many that none is in the cache when its turn comes again."""
    each = n_bytes // 8
    if each * 4 * _COLD_TENSORS < _COLD_BYTES:
        return {}
    source = torch.rand(max(2 * each, _COLD_BYTES // 4), device=device)
    tensors, y = itertools.cycle(source.split(each)[: source.numel() // each]), torch.empty(each, device=device)
    return {COLD: (lambda: torch.mul(next(tensors), 2.0, out=y), 2 * y.nbytes)}


def optimizer_runs(device: torch.device, n_bytes: int, half: bool = False) -> dict[str, tuple[Run, int]]:
    """Eight tensors updated: by AdamW in one kernel (four reads, three writes), and by one operation over the list."""
    dtype = torch.bfloat16 if half else torch.float32
    each = max(1024, n_bytes // (7 * dtype.itemsize * 8))
    weights = [torch.rand(each, device=device, dtype=dtype, requires_grad=True) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.rand_like(weight)
    stepper = torch.optim.AdamW(weights, fused=True)
    row = max(1024, n_bytes // (3 * dtype.itemsize * 8))
    rows = [torch.rand(row, device=device, dtype=dtype) for _ in range(8)]
    others = [torch.rand_like(row) for row in rows]
    moved = sum(weight.nbytes for weight in weights), sum(row.nbytes for row in rows)
    name = HALF if half else ""
    return {
        f"{OPTIMIZER}{FUSED}{name}": (stepper.step, 7 * moved[0]),
        f"{OPTIMIZER}{name}": (lambda: foreach_add_(rows, others), 3 * moved[1]),
    }


def probe_memory(watch: Stopwatch, sizes: tuple[int, ...]) -> Iterator[Probe]:
    """Every class of kernels that is bound by memory, at every size."""
    device, halves = watch.device, (False, True) if watch.device.type == "cuda" else (False,)
    for size in sizes:
        for make, half in itertools.product((memory_runs, optimizer_runs), halves):
            yield from _probe_runs(watch, make(device, size, half=half))
        if device.type == "cuda":
            yield from _probe_runs(watch, cold_runs(device, size))


def _probe_runs(watch: Stopwatch, runs: dict[str, tuple[Run, int]]) -> Iterator[Probe]:
    return (Probe(what=kind, amount=float(moved), ns=watch.ns(run)) for kind, (run, moved) in runs.items())


def probe_matmul(
    watch: Stopwatch, dtypes: tuple[str, ...], shapes: tuple[tuple[int, int, int, int], ...]
) -> Iterator[Probe]:
    """Products `[batch, M, K] @ [batch, K, N]`, the second stored as a linear layer stores its weight."""
    for dtype in dtypes:
        apply_fp32_matmul(Recipe(precision="tf32" if dtype == "tf32" else "fp32"))
        for batch, m, n, k in shapes:
            a = torch.randn(
                batch, m, k, device=watch.device, dtype=torch_dtype(dtype)
            )  # as weights and activations are:
            b = torch.randn(batch, n, k, device=watch.device, dtype=torch_dtype(dtype)).transpose(
                1, 2
            )  # power follows data
            a, b = (a[0], b[0]) if batch == 1 else (a, b)
            flops = 2 * batch * m * n * k
            ns = watch.ns(partial(torch.matmul, a, b))
            yield Probe(what="matmul", dtype=dtype, amount=float(flops), shape=(batch, m, n, k), ns=ns)


def probe_backward_matmul(
    watch: Stopwatch, dtypes: tuple[str, ...], layers: tuple[tuple[int, int, int], ...]
) -> Iterator[Probe]:
    """The two products of a linear layer's backward pass, from (rows, outs, ins), each tensor in its memory order.

    Neither has the dimension that is summed over last in both factors, as the tensor cores of some GPUs want TF32.
    """
    for dtype in dtypes:
        apply_fp32_matmul(Recipe(precision="tf32" if dtype == "tf32" else "fp32"))
        for rows, outs, ins in layers:
            gradient, weight, x = (
                torch.randn(shape, device=watch.device, dtype=torch_dtype(dtype))
                for shape in ((rows, outs), (outs, ins), (rows, ins))
            )
            for run, shape in (
                (partial(torch.matmul, gradient, weight), (1, rows, ins, outs)),
                (partial(torch.matmul, gradient.t(), x), (1, outs, ins, rows)),
            ):
                flops = 2.0 * rows * outs * ins
                yield Probe(what="matmul", dtype=dtype + BACKWARD, amount=flops, shape=shape, ns=watch.ns(run))


def probe_attention(
    watch: Stopwatch, dtypes: tuple[str, ...], shapes: tuple[tuple[int, int, int, int], ...], backend: str = ""
) -> Iterator[Probe]:
    """Fused causal attention on `[batch, heads, context, width]`; FLOPs count the whole square, as profilers do.

    `backend` is "" for the one that PyTorch picks; a backend that cannot run here has no probes.
    """
    attend = attention_function(_ATTENTIONS[backend], compiled_elsewhere=False)
    for dtype in dtypes:
        way = f"{dtype}, {backend}" if backend else dtype
        for shape in shapes:
            batch, heads, context, width = shape
            q, k, v = (
                torch.randn(shape, device=watch.device, dtype=torch_dtype(dtype), requires_grad=True) for _ in range(3)
            )
            forward = partial(attend, q, k, v)
            flops = 4 * batch * heads * context * context * width
            try:
                with torch.no_grad():
                    ns = watch.ns(forward)
            except Unsupported:
                return
            yield Probe(what="attention", dtype=way, amount=float(flops), shape=shape, ns=ns)
            out = forward()
            backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
            ns = watch.ns(backward)
            yield Probe(what="attention backward", dtype=way, amount=2.5 * flops, shape=shape, ns=ns)
