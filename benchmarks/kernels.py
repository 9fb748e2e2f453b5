"""How fast the kernels are: each operation beside torch eager, torch.compile and the chip's own limit, in one process.

    python benchmarks/kernels.py [--only gelu,attention] [--budget 240] [--tuned d64.json] [-o kernels.md] [--json kernels.json]

The limits are measured first: a device copy of 2 GiB and a bf16 matmul of 8192³. Inputs are random and larger than the
L2 cache. A row is timed with CUDA events, one pair a run, median of many, after its results have been compared with a
reference in a wider dtype: a wrong result is a row that says so and has no time. Bytes count each input read once and
each output written once; FLOPs those of causal attention, half of the square. What raises is a row of its own.
"""

import argparse
import dataclasses
import functools
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

OURS = ("triton", "cuda", "triton, clipped")
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of ‖found − wanted‖ / ‖wanted‖
Run = Callable[[], Sequence[Tensor]]
DEVICE = "cuda"

# Shapes: some as others report them, the rest larger than the L2 cache (60 MB) several times over.
DTYPES = (torch.bfloat16, torch.float32)
ROWS, COLUMNS = 16384, 8192
GELU_SIDE = 16384
ROPE_SHAPE = (8, 32, 4096, 128)
LOSS_SHAPE = (8192, 128_256, 4096)  # tokens, words, width
ATTENTION_SHAPES = ((1, 16, 16384, 64), (4, 16, 4096, 128))  # the course's leaderboard; 16k tokens of 2048 numbers
GROUPED_SHAPE = (2, 32, 8, 4096, 128)  # 8k tokens of 4096 numbers, four heads of queries to one of keys and values
ADAMW_TENSORS, ADAMW_SHAPE = 250, (4096, 1024)


@dataclasses.dataclass(frozen=True)
class Contest:
    """One operation on one shape: every entry does the same work."""

    op: str
    shape: str
    work: float  # bytes or FLOPs
    truth: Run  # what the first results must be
    entries: Mapping[str, Callable[[], Run]]  # made when its turn comes: what cannot be made is a row
    bound: float
    unit: str = "GB/s"  # or TFLOP/s
    peak: bool = False  # whether memory is of interest


@dataclasses.dataclass
class Row:
    """One entry's result."""

    op: str
    shape: str
    entry: str
    ms: float | None = None
    spread: float | None = None  # (p90 − p10) / median
    rate: float | None = None
    unit: str = ""
    of_ceiling: float | None = None
    to_best_peer: float | None = None
    error: float | None = None
    peak_bytes: int | None = None
    note: str = ""


BATCH = 10  # runs that are queued at once


def times_ms(run: Callable[[], Any], seconds: float = 0.25) -> list[float]:
    """The time of each of many runs on the GPU, which is never waiting for the host."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    host = time.perf_counter() - began
    first = _timed(run, 1, host)[0]
    count = max(7, min(60, int(1000 * seconds / max(first, 1e-3))))
    return [t for start in range(0, count, BATCH) for t in _timed(run, min(BATCH, count - start), host)]


def _timed(run: Callable[[], Any], count: int, host: float) -> list[float]:
    """The GPU sleeps first for as long as the host needs to queue all runs (`host` seconds each), and half as long again."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9 * min(0.1, 1.5 * host * count + 1e-3)))  # cycles, of which there are at most 2e9 a second
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def ceilings() -> dict[str, float]:
    """This chip's copy bandwidth (GB/s) and bf16 matmul rate (TFLOP/s), here and now."""
    source = torch.randn(2**29, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / statistics.median(times_ms(lambda: target.copy_(source))) / 1e6
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * 8192**3 / statistics.median(times_ms(lambda: a @ b)) / 1e9
    return {"GB/s": copy, "TFLOP/s": matmul}


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest ‖found − wanted‖ / ‖wanted‖ of all results."""
    if len(found) != len(wanted):
        raise ValueError(f"{len(found)} results, {len(wanted)} wanted")
    largest = 0.0
    for ours, truth in zip(found, wanted, strict=True):
        if ours.shape != truth.shape:
            raise ValueError(f"a result of shape {tuple(ours.shape)}, {tuple(truth.shape)} wanted")
        off = ((ours.float() - truth.float()).norm() / truth.float().norm()).item()
        largest = off if off != off else max(largest, off)
        if largest != largest:
            break
    return largest


def hold(contest: Contest, limits: Mapping[str, float]) -> list[Row]:
    """Every entry checked, then timed."""
    rows = []
    with torch.no_grad():
        truth = [x.detach() for x in _with_grad(contest.truth)]
    for name, make in contest.entries.items():
        row = Row(contest.op, contest.shape, name, unit=contest.unit)
        rows.append(row)
        try:
            _measure(row, contest, make, truth, limits[contest.unit])
        except Exception as error:  # noqa: BLE001
            row.note = _told(error)
        gc.collect()
        torch.cuda.empty_cache()
    peers = [row.ms for row in rows if row.ms and row.entry not in OURS]
    for row in rows:
        if row.ms and peers and row.entry in OURS:
            row.to_best_peer = row.ms / min(peers)
    return rows


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")[:160]


def _with_grad(run: Run) -> Sequence[Tensor]:
    with torch.enable_grad():
        return run()


def _measure(row: Row, contest: Contest, make: Callable[[], Run], truth: Sequence[Tensor], limit: float) -> None:
    run = make()
    row.error = distance(_with_grad(run), truth)
    if not row.error <= contest.bound:
        row.note = f"WRONG: off by {row.error:.2e}"
        return
    if contest.peak:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        row.peak_bytes = torch.cuda.max_memory_allocated() - before
    measured = sorted(times_ms(run))
    row.ms = statistics.median(measured)
    row.spread = (measured[int(0.9 * (len(measured) - 1))] - measured[int(0.1 * len(measured))]) / row.ms
    row.rate = contest.work / row.ms / (1e6 if contest.unit == "GB/s" else 1e9)
    row.of_ceiling = row.rate / limit


# --- the operations ---------------------------------------------------------------------------------------------------


def kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"flopwise.kernels.{module}"), name)


def _random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_(grad)


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def forward(f: Callable[..., Any], *inputs: Tensor) -> Run:
    def run() -> Sequence[Tensor]:
        with torch.no_grad():
            return _tuple(f(*inputs))

    return run


def both(f: Callable[..., Any], inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> Run:
    """Forward and backward, without the time of adding up gradients."""
    wanted = [x for x in inputs if x.requires_grad]

    def run() -> Sequence[Tensor]:
        outputs = _tuple(f(*inputs))
        return [*outputs, *torch.autograd.grad(outputs, wanted, upstream)]

    return run


def gelu() -> Iterator[Contest]:
    x = _random(GELU_SIDE, GELU_SIDE)
    ways = kernel("gelu", "GELU")

    def entry(name: str) -> Callable[[], Run]:
        return lambda: forward(ways[name], x)

    yield Contest(
        "gelu", f"{GELU_SIDE}² fp32", 2 * x.nbytes, lambda: [F.gelu(x.double(), approximate="tanh")],
        {name: entry(name) for name in ways}, BOUNDS[torch.float32],
    )  # fmt: skip


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def _rms_norm_formula(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight), total


def _add_rms_norm_formula(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm_formula(total, weight), total


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _rowwise(
    op: str,
    shape: str,
    dtype: torch.dtype,
    inputs: Sequence[Tensor],
    upstream: Sequence[Tensor],
    eager: Callable[..., Any],
    formula: Callable[..., Any],
    ours: Callable[[], Callable[..., Any]],
    tensors: tuple[int, int],
) -> Iterator[Contest]:
    """Forward alone, then with its backward pass. `tensors`: how many of the large tensors each moves."""
    size, bound = upstream[0].nbytes, BOUNDS[dtype]
    wide = [x.detach().float().requires_grad_(x.requires_grad) for x in inputs]
    above = [g.float() for g in upstream]
    name = str(dtype).removeprefix("torch.")
    yield Contest(
        op, f"{shape} {name}", tensors[0] * size, forward(formula, *wide),
        {
            "torch": lambda: forward(eager, *inputs),
            "compile": lambda: forward(torch.compile(formula, dynamic=False), *inputs),
            "triton": lambda: forward(ours(), *inputs),
        },
        bound,
    )  # fmt: skip
    yield Contest(
        f"{op}, with backward", f"{shape} {name}", sum(tensors) * size, both(formula, wide, above),
        {
            "torch": lambda: both(eager, inputs, upstream),
            "compile": lambda: both(torch.compile(formula, dynamic=False), inputs, upstream),
            "triton": lambda: both(ours(), inputs, upstream),
        },
        bound,
    )  # fmt: skip


def _pair(dtype: torch.dtype, inputs: int) -> tuple[list[Tensor], Tensor]:
    return [_random(ROWS, COLUMNS, dtype=dtype, grad=True) for _ in range(inputs)], _random(ROWS, COLUMNS, dtype=dtype)


def rms_norm() -> Iterator[Contest]:
    for dtype in DTYPES:
        (x,), g = _pair(dtype, 1)
        weight = _random(COLUMNS, dtype=dtype, grad=True)

        def ours() -> Callable[..., Any]:
            function = kernel("rms_norm", "rms_norm")
            return lambda *given: function(*given, 1e-5)

        inputs, shape = (x, weight), f"{ROWS} × {COLUMNS}"
        yield from _rowwise("rms_norm", shape, dtype, inputs, [g], _rms_norm, _rms_norm_formula, ours, (2, 3))


def add_rms_norm() -> Iterator[Contest]:
    for dtype in DTYPES:
        (x, residual), g = _pair(dtype, 2)
        weight = _random(COLUMNS, dtype=dtype, grad=True)

        def ours() -> Callable[..., Any]:
            function = kernel("rms_norm", "add_rms_norm")
            return lambda *given: function(*given, 1e-5)

        inputs, above = (x, residual, weight), [g, torch.randn_like(g)]
        yield from _rowwise(
            "add_rms_norm", f"{ROWS} × {COLUMNS}", dtype, inputs, above, _add_rms_norm, _add_rms_norm_formula, ours, (4, 4)
        )  # fmt: skip


def swiglu() -> Iterator[Contest]:
    for dtype in DTYPES:
        inputs, g = _pair(dtype, 2)
        ours = functools.partial(kernel, "swiglu", "swiglu")
        yield from _rowwise("swiglu", f"{ROWS} × {COLUMNS}", dtype, inputs, [g], _swiglu, _swiglu, ours, (3, 5))


def softmax() -> Iterator[Contest]:
    for dtype in DTYPES:
        inputs, g = _pair(dtype, 1)
        ours = functools.partial(kernel, "softmax", "softmax")
        yield from _rowwise("softmax", f"{ROWS} × {COLUMNS}", dtype, inputs, [g], _softmax, _softmax, ours, (2, 3))


def rope() -> Iterator[Contest]:
    for dtype in DTYPES:
        context, dim = ROPE_SHAPE[2:]
        x, g = _random(*ROPE_SHAPE, dtype=dtype, grad=True), _random(*ROPE_SHAPE, dtype=dtype)
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
        angles = torch.arange(context, device=DEVICE)[:, None] * frequencies
        inputs = (x, angles.cos(), angles.sin())
        ours = functools.partial(kernel, "rope", "rope")
        yield from _rowwise("rope", " × ".join(map(str, ROPE_SHAPE)), dtype, inputs, [g], _rope, _rope, ours, (2, 2))


def cross_entropy() -> Iterator[Contest]:
    tokens, vocabulary, width = LOSS_SHAPE
    hidden = _random(tokens, width, dtype=torch.bfloat16, grad=True)
    weight = (_random(vocabulary, width, dtype=torch.bfloat16) * 0.02).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    one = torch.ones((), device=DEVICE)

    def full(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), targets)

    def chunked() -> Run:
        loss = importlib.import_module("flopwise.lm.loss").loss_chunked
        return both(lambda h, w: loss(h, w, targets), (hidden, weight), [one])

    def ours() -> Run:
        loss = kernel("cross_entropy", "linear_cross_entropy")
        return both(lambda h, w: loss(h, w, targets), (hidden, weight), [one])

    def truth() -> Sequence[Tensor]:
        wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
        return [x.to(torch.float32) for x in both(full, wide, [one])()]

    entries = {
        "torch": lambda: both(full, (hidden, weight), [one]),
        "compile": lambda: both(torch.compile(full, dynamic=False), (hidden, weight), [one]),
        "torch, chunked": chunked,
        "triton": ours,
    }
    flops = 3 * 2 * tokens * vocabulary * width
    shape = f"{tokens} tokens × {vocabulary} words × {width} bf16"
    yield Contest(
        "cross_entropy, with backward", shape, flops, truth, entries, BOUNDS[torch.bfloat16], "TFLOP/s", peak=True
    )


@functools.cache
def _flex() -> Callable[..., Tensor]:
    """FlexAttention, compiled once for all parts of a contest."""
    compiled = torch.compile(flex_attention, dynamic=False)

    @functools.cache
    def mask(n: int) -> Any:
        return create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=DEVICE)

    return lambda q, k, v: compiled(q, k, v, block_mask=mask(q.shape[-2]))


def _attention_entries() -> dict[str, Callable[[], Callable[..., Tensor]]]:
    def pinned(backend: SDPBackend) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

        return attend

    def ours() -> Callable[..., Tensor]:
        function = kernel("attention_triton", "flash_attention")
        return lambda q, k, v: function(q, k, v, causal=True)

    return {
        "sdpa-flash": lambda: pinned(SDPBackend.FLASH_ATTENTION),
        "sdpa-cudnn": lambda: pinned(SDPBackend.CUDNN_ATTENTION),
        "flex": _flex,
        "triton": ours,
    }


def attention() -> Iterator[Contest]:
    """Forward, backward alone (the forward pass run before), and both. Checked on one head of keys against fp32."""
    for batch, heads, context, dim in ATTENTION_SHAPES:
        q, k, v = (_random(batch, heads, context, dim, dtype=torch.bfloat16, grad=True) for _ in range(3))
        g = _random(batch, heads, context, dim, dtype=torch.bfloat16)
        shape = f"{batch} × {heads} × {context} × {dim} bf16 causal"
        flops = 4 * batch * heads * context**2 * dim / 2
        yield from _attention_contests("attention", shape, flops, (q, k, v), g, _attention_entries())


def attention_grouped() -> Iterator[Contest]:
    """The same with fewer heads of keys and values than of queries."""
    batch, heads, kv_heads, context, dim = GROUPED_SHAPE
    q, g = (_random(batch, heads, context, dim, dtype=torch.bfloat16) for _ in range(2))
    k, v = (_random(batch, kv_heads, context, dim, dtype=torch.bfloat16, grad=True) for _ in range(2))
    shape = f"{batch} × {heads} on {kv_heads} × {context} × {dim} bf16 causal"
    flops = 4 * batch * heads * context**2 * dim / 2
    entries = {name: make for name, make in _attention_entries().items() if name != "flex"}
    yield from _attention_contests("attention, grouped", shape, flops, (q.requires_grad_(), k, v), g, entries)


def _attention_contests(
    op: str,
    shape: str,
    flops: float,
    inputs: Sequence[Tensor],
    g: Tensor,
    ways: Mapping[str, Callable[[], Callable[..., Tensor]]],
) -> Iterator[Contest]:
    kv_heads = inputs[1].shape[1]

    def group(x: Tensor) -> Tensor:
        """The first head of keys or values, or all heads of queries that meet it; a view costs nothing."""
        return x[:1, : x.shape[1] // kv_heads]

    def truth() -> Sequence[Tensor]:
        q, k, v = (group(x).detach().float().requires_grad_() for x in inputs)
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [out, *torch.autograd.grad(out, (q, k, v), group(g).float())]

    checked: dict[str, Sequence[Tensor]] = {}

    def wanted() -> Sequence[Tensor]:
        checked["all"] = checked.get("all") or [x.detach() for x in truth()]
        return checked["all"]

    def way(make: Callable[[], Callable[..., Tensor]], part: str) -> Callable[[], Run]:
        def entry() -> Run:
            attend = make()
            if part == "forward":
                return forward(attend, *inputs)
            if part == "both":
                return both(attend, inputs, [g])
            out = attend(*inputs)
            return lambda: torch.autograd.grad(out, inputs, g, retain_graph=True)

        return entry

    wholes = {"forward": (1.0, slice(0, 1)), "backward": (2.5, slice(1, 4)), "both": (3.5, slice(0, 4))}
    for part, (share, results) in wholes.items():
        entries = {name: _viewed(way(make, part), group) for name, make in ways.items()}
        name = f"{op}, {'forward and backward' if part == 'both' else part}"
        yield Contest(
            name, shape, share * flops, lambda r=results: wanted()[r], entries, BOUNDS[torch.bfloat16], "TFLOP/s"
        )


def _viewed(make: Callable[[], Run], view: Callable[[Tensor], Tensor]) -> Callable[[], Run]:
    """A run whose results are a part of what it computes."""

    def entry() -> Run:
        with torch.enable_grad():
            run = make()
        return lambda: [view(x) for x in run()]

    return entry


def adamw() -> Iterator[Contest]:
    """A billion fp32 parameters in 250 tensors. Each entry has its own, made and freed in its turn."""
    count, shape = ADAMW_TENSORS, ADAMW_SHAPE

    def params(n: int) -> list[torch.nn.Parameter]:
        generator = torch.Generator(DEVICE).manual_seed(1)
        made = []
        for _ in range(n):  # parameter, gradient, parameter, …: the first are the same however many follow
            made.append(torch.nn.Parameter(torch.randn(shape, generator=generator, device=DEVICE)))
            made[-1].grad = torch.randn(shape, generator=generator, device=DEVICE)
        return made

    def ours(ps: list[torch.nn.Parameter], **options: Any) -> Any:
        return kernel("adamw", "AdamW")(ps, 1e-3, (0.9, 0.95), weight_decay=0.1, **options)

    def torchs(ps: list[torch.nn.Parameter], **options: Any) -> Any:
        return torch.optim.AdamW(ps, 1e-3, (0.9, 0.95), weight_decay=0.1, **options)

    def entry(
        make: Callable[..., Any], clip: bool = False, compiled: bool = False, **options: Any
    ) -> Callable[[], Run]:
        def start() -> Run:
            ps = params(count)
            optimizer = make(ps, **options)
            step = torch.compile(optimizer.step) if compiled else optimizer.step

            def run() -> Sequence[Tensor]:
                if clip:
                    torch.nn.utils.clip_grad_norm_(ps, 1e4)
                step()
                return [ps[0].detach()]

            return run

        return start

    def truth() -> Sequence[Tensor]:
        """The first tensor after one step, in float64. The norm is 32,000, so clipping scales gradients: Adam's first
        step does not depend on it.
        """
        p = params(1)[0]
        wide = torch.nn.Parameter(p.detach().double())
        wide.grad = p.grad.double()
        torch.optim.AdamW([wide], 1e-3, (0.9, 0.95), weight_decay=0.1).step()
        return [wide.detach()]

    elements = count * shape[0] * shape[1]
    what = f"{elements / 1e9:.2f} billion fp32 in {count} tensors"
    entries = {
        "torch, foreach": entry(torchs, foreach=True),
        "torch, fused": entry(torchs, fused=True),
        "compile": entry(torchs, compiled=True, foreach=True, capturable=True),
        "triton": entry(ours),
    }
    yield Contest("adamw", what, 28 * elements, truth, entries, 1e-6)
    clipped = {"torch, fused": entry(torchs, clip=True, fused=True), "triton, clipped": entry(ours, max_grad_norm=1e4)}
    yield Contest("adamw, clipped", what, 32 * elements, truth, clipped, 1e-6)


OPS = {
    "gelu": gelu,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "swiglu": swiglu,
    "softmax": softmax,
    "rope": rope,
    "adamw": adamw,
    "attention": attention,
    "attention_grouped": attention_grouped,
    "cross_entropy": cross_entropy,
}


# --- the tables -------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], limits: Mapping[str, float]) -> str:
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {limits['GB/s']:.0f} GB/s, "
        f"bf16 matmul of 8192³ {limits['TFLOP/s']:.0f} TFLOP/s, measured in the same run.",
        "",
        "| operation | shape | entry | ms | spread | rate | of the ceiling | to the best peer | error | peak memory |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    head = f"| {row.op} | {row.shape} | {row.entry} | "
    if row.ms is None:
        return head + f"{row.note} | | | | | | |"
    cells = (
        f"{row.ms:.3f}",
        f"{row.spread:.1%}",
        f"{row.rate:.0f} {row.unit}",
        f"{row.of_ceiling:.1%}",
        f"{row.to_best_peer:.2f}x" if row.to_best_peer else "",
        f"{row.error:.1e}",
        f"{row.peak_bytes / 1e9:.2f} GB" if row.peak_bytes else "",
    )
    return head + " | ".join(cells) + " |"


def measure_all(names: Sequence[str], budget: float, limits: Mapping[str, float]) -> Iterator[list[Row]]:
    """Operation after operation; one that cannot even make its inputs is a row, and so is one there is no time for."""
    end = time.monotonic() + budget
    for name in names:
        if time.monotonic() > end:
            yield [Row(name, "", "", note=f"not run: the {budget:.0f} s are over")]
            continue
        try:
            for contest in OPS[name]():
                yield hold(contest, limits)
        except Exception as error:  # noqa: BLE001
            yield [Row(name, "", "", note=_told(error))]
        torch._dynamo.reset()  # a function compiled for too many shapes is not compiled any more


def take(tuned: Mapping[str, Mapping[str, Any]]) -> str:
    """Run with the constants that a tuning script found best instead of those that are shipped."""
    told = []
    for module, constants in tuned["best"].items():
        place = importlib.import_module(f"flopwise.kernels.{module}")
        for name, value in constants.items():
            if isinstance(value, dict):  # a row of a table of attention's tiles
                config = kernel("attention_tiles", "Config")(**value["config"])
                getattr(place, name)[value["arch"], value["head_dim"]] = config
                told.append(f"{name} {tuple(config)}")
            else:
                setattr(place, name, value)
                told.append(f"{module}.{name} = {value}")
    return ", ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"operations, separated by commas: {', '.join(OPS)}")
    parser.add_argument("--budget", type=float, default=240, help="seconds after which no operation is begun")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of the operations on rows")
    parser.add_argument(
        "--tuned", nargs="*", type=Path, default=[], help="what kernel_tune.py and attention_tune.py wrote"
    )
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(OPS)
    unknown = [name for name in names if name not in OPS]
    if unknown:
        parser.error(f"no operation {', '.join(unknown)}: there are {', '.join(OPS)}")
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    global DTYPES
    DTYPES = tuple(getattr(torch, name) for name in given.dtypes.split(","))
    for path in given.tuned:
        print(f"with {take(json.loads(path.read_text()))}", flush=True)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    limits = ceilings()
    rows: list[Row] = []
    for found in measure_all(names, given.budget, limits):
        rows += found
        print("\n".join(_line(row) for row in found), flush=True)
        table = markdown(rows, limits)
        if given.output:  # after every operation: what is measured is kept whatever comes next
            given.output.write_text(table)
        if given.json:
            text = {"ceilings": limits, "rows": [dataclasses.asdict(row) for row in rows]}
            given.json.write_text(json.dumps(text, indent=1) + "\n")
    print("\n" + markdown(rows, limits))


if __name__ == "__main__":
    main()
