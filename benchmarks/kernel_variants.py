"""Ways to write a kernel that are not shipped, timed in turns beside the shipped one and its peer: an experiment.

    python benchmarks/kernel_variants.py forward|backward|whole|norm|special [--only NAME,NAME] [--rounds 7]

Each variant is checked against fp32 first. A row that does not compile or is wrong says so. `special` asks for warp
specialisation, which may end the process: run it last. Attention is causal, [heads · T, D], T a multiple of the tiles.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from flopwise.kernels.attention_backward import launch_backward
from flopwise.kernels.attention_tiles import LOG2E, Problem
from flopwise.kernels.attention_triton import launch_forward
from flopwise.kernels.rms_norm_forward import Form
from flopwise.kernels.rms_norm_forward import launch_forward as launch_norm

_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(1 / LOG2E)

# 2^x for x <= 0 of one number by multiply-adds: round to the nearest integer by adding 1.5 · 2^23, a polynomial of the rest
# (degree 3, off by 8e-5 at most), the integer added to the exponent.
_ONE = """
    max.f32 a, ${x}, 0fC2FA0000;
    add.f32 b, a, 0f4B400000;
    sub.f32 c, b, 0f4B400000;
    sub.f32 a, a, c;
    fma.rn.f32 c, a, 0f3D61FBB0, 0f3E786F0D;
    fma.rn.f32 c, c, a, 0f3F31798D;
    fma.rn.f32 c, c, a, 0f3F7FFB49;
    mov.b32 n, b;
    shl.b32 n, n, 23;
    mov.b32 k, c;
    add.s32 n, n, k;
    mov.b32 ${y}, n;"""


def _mixed(of: int) -> str:
    """PTX of `of` powers of two, the first of them by multiply-adds."""
    lines = [_ONE.replace("${x}", f"${of}").replace("${y}", "$0")]
    lines += [f"    ex2.approx.ftz.f32 ${n}, ${of + n};" for n in range(1, of)]
    return "{\n    .reg .f32 a, b, c;\n    .reg .b32 n, k;" + "\n".join(lines) + "\n}"


_MIXED = {of: tl.constexpr(_mixed(of)) for of in (2, 4, 8)}
_MIXED2, _MIXED4, _MIXED8 = _MIXED[2], _MIXED[4], _MIXED[8]
_OUT2, _OUT4, _OUT8 = (tl.constexpr(",".join(["=&f"] * of + ["f"] * of)) for of in (2, 4, 8))


@triton.jit
def _power(x, POLY: tl.constexpr):
    """2^x; every POLY-th by multiply-adds, so that the unit for exponentials has less to do."""
    if POLY == 2:
        return tl.inline_asm_elementwise(_MIXED2, _OUT2, [x], dtype=tl.float32, is_pure=True, pack=2)
    if POLY == 4:
        return tl.inline_asm_elementwise(_MIXED4, _OUT4, [x], dtype=tl.float32, is_pure=True, pack=4)
    if POLY == 8:
        return tl.inline_asm_elementwise(_MIXED8, _OUT8, [x], dtype=tl.float32, is_pure=True, pack=8)
    return tl.exp2(x)


@triton.jit
def _dot(a, b, WIDE: tl.constexpr):
    return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee") if WIDE else tl.dot(a, b)


@triton.jit
def _dot_add(a, b, total, WIDE: tl.constexpr):
    return total + _dot(a, b, True) if WIDE else tl.dot(a, b, total)


@triton.jit
def _soften(total, m, z, scores, v, scale, C: tl.constexpr):
    new_m = tl.maximum(m, tl.max(scores, 1) * scale)
    weights = _power(scores * scale - new_m[:, None], C.poly)
    shrink = tl.exp2(m - new_m)
    z = z * shrink + tl.sum(weights, 1)
    if C.seldom:  # the output is scaled only where some row's maximum has grown
        if tl.min(shrink) < 1.0:
            total = total * shrink[:, None]
    else:
        total = total * shrink[:, None]
    return _dot_add(weights.to(v.dtype), v, total, C.wide), new_m, z


@triton.jit
def _forward_tile(q_in, k_in, v_in, o_out, l_out, tile, row, scale, C: tl.constexpr):
    start = tile * C.m
    queries = start + tl.arange(0, C.m)
    if C.special:  # described here: the compiler halves the tile, and could not halve the host's
        rows = tl.num_programs(1) * C.length
        q = tl.make_tensor_descriptor(q_in, [rows, C.d], [C.d, 1], [C.m, C.d]).load([row + start, 0])
    else:
        q = q_in.load([row + start, 0])
    total = tl.full([C.m, C.d], 0.0, tl.float32)
    m = tl.full([C.m], float("-inf"), tl.float32)
    z = tl.full([C.m], 0.0, tl.float32)
    if C.special:  # one loop, masked throughout: with two, or an `if`, the compiler fails or leaves it
        for first in tl.range(0, start + C.m, C.n, warp_specialize=True):
            k = k_in.load([row + first, 0])
            keys = first + tl.arange(0, C.n)
            scores = tl.where(keys[None, :] <= queries[:, None], _dot(q, k.T, C.wide), float("-inf"))
            total, m, z = _soften(total, m, z, scores, v_in.load([row + first, 0]), scale, C)
    else:
        whole = (start + 1) // C.n * C.n
        for first in range(0, whole, C.n):
            k = k_in.load([row + first, 0])
            scores = _dot(q, k.T, C.wide)
            total, m, z = _soften(total, m, z, scores, v_in.load([row + first, 0]), scale, C)
        for first in range(whole, start + C.m, C.n):
            k = k_in.load([row + first, 0])
            keys = first + tl.arange(0, C.n)
            scores = tl.where(keys[None, :] <= queries[:, None], _dot(q, k.T, C.wide), float("-inf"))
            total, m, z = _soften(total, m, z, scores, v_in.load([row + first, 0]), scale, C)
    at = (row + queries)[:, None] * C.d + tl.arange(0, C.d)[None, :]
    tl.store(o_out + at, (total * (1.0 / z)[:, None]).to(o_out.dtype.element_ty))
    tl.store(l_out + row + queries, (m + tl.log2(z)) * _LN2)


@triton.jit
def forward_kernel(q_in, k_in, v_in, o_out, l_out, length, scale, C: tl.constexpr):
    tiles = length // C.m
    row = tl.program_id(1) * length
    tile = tiles - 1 - tl.program_id(0)
    _forward_tile(q_in, k_in, v_in, o_out, l_out, tile, row, scale, C)
    if C.pair:  # the longest with the shortest: all programs are of one length
        _forward_tile(q_in, k_in, v_in, o_out, l_out, tl.program_id(0), row, scale, C)


@triton.jit
def _back_step(
    dk, dv, k, v, q_in, g_in, l_in, d_in, dq_out, row, start, keys, scale, MASKED: tl.constexpr, C: tl.constexpr
):
    """One tile of queries sends back to one of keys, and is sent its part of dQ in the same pass."""
    queries = start + tl.arange(0, C.m)
    q = q_in.load([row + start, 0])
    logsumexp = tl.load(l_in + row + queries) * _LOG2E
    scores = _dot(k, q.T, C.wide)  # [n, m]
    weights = _power(scores * scale - logsumexp[None, :], C.poly)
    if MASKED:
        weights = tl.where(keys[:, None] <= queries[None, :], weights, 0.0)
    g = g_in.load([row + start, 0])
    dv = _dot_add(weights.to(g.dtype), g, dv, C.wide)
    dweights = _dot(v, g.T, C.wide)
    delta = tl.load(d_in + row + queries)
    dscores = (weights * (dweights - delta[None, :])).to(q.dtype)
    dk = _dot_add(dscores, q, dk, C.wide)
    if C.reduce == "tma":
        dq_out.atomic_add([row + start, 0], _dot(dscores.T, k, C.wide))
    elif C.reduce == "across":  # dQᵀ, in a tensor [heads · D, T]
        dq = _dot(k.T, dscores, C.wide)
        dq_out.atomic_add([row // C.length * C.d, start], dq)
    elif C.reduce == "atomic":
        at = (row + queries)[:, None] * C.d + tl.arange(0, C.d)[None, :]
        tl.atomic_add(dq_out + at, _dot(dscores.T, k, C.wide), sem="relaxed")
    return dk, dv


@triton.jit
def backward_kernel(q_in, k_in, v_in, g_in, l_in, d_in, dq_out, dk_out, dv_out, length, scale, C: tl.constexpr):
    first = tl.program_id(0) * C.n
    row = tl.program_id(1) * length
    keys = first + tl.arange(0, C.n)
    k = k_in.load([row + first, 0])
    v = v_in.load([row + first, 0])
    dk = tl.full([C.n, C.d], 0.0, tl.float32)
    dv = tl.full([C.n, C.d], 0.0, tl.float32)
    low = first // C.m * C.m
    full = (first + C.n - 1 + C.m - 1) // C.m * C.m
    for start in range(low, tl.minimum(full, length), C.m):
        dk, dv = _back_step(dk, dv, k, v, q_in, g_in, l_in, d_in, dq_out, row, start, keys, scale, True, C)
    for start in range(full, length, C.m):
        dk, dv = _back_step(dk, dv, k, v, q_in, g_in, l_in, d_in, dq_out, row, start, keys, scale, False, C)
    at = (row + keys)[:, None] * C.d + tl.arange(0, C.d)[None, :]
    tl.store(dv_out + at, dv.to(dv_out.dtype.element_ty))
    tl.store(dk_out + at, (dk * (scale / _LOG2E)).to(dk_out.dtype.element_ty))


@triton.jit
def delta_kernel(o_in, g_in, d_out, dq_out, D: tl.constexpr, ROWS: tl.constexpr):
    """Δ of some rows; and their dQ, which is added to later, is set to 0."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(d_out + rows, tl.sum(tl.load(o_in + at).to(tl.float32) * tl.load(g_in + at).to(tl.float32), 1))
    tl.store(dq_out + at, tl.full([ROWS, D], 0.0, tl.float32))


@triton.jit
def narrow_kernel(wide_in, dq_out, scale, length, D: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr):
    """dQ, scaled, in its dtype."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    at = rows[:, None] * D + columns[None, :]
    if ACROSS:
        x = tl.load(wide_in + (rows // length * D * length + rows % length)[:, None] + columns[None, :] * length)
    else:
        x = tl.load(wide_in + at)
    tl.store(dq_out + at, (x * scale).to(dq_out.dtype.element_ty))


@dataclass(frozen=True)
class Options:
    """What an attention variant is compiled for."""

    m: int
    n: int
    warps: int
    stages: int
    poly: int = 0
    pair: bool = False
    seldom: bool = False
    special: bool = False
    reduce: str = "tma"
    registers: int | None = None
    d: int = 64
    length: int = 0
    wide: bool = False  # in the interpreter, which takes bf16 for integers

    def launch(self) -> dict[str, Any]:
        return {"C": self, "num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


FORWARD = {
    "128x64x8": Options(128, 64, 8, 3),
    "64x128 poly 1/8": Options(64, 128, 4, 3, poly=8),
    "64x128 poly 1/4": Options(64, 128, 4, 3, poly=4),
    "64x128 poly 1/2": Options(64, 128, 4, 3, poly=2),
    "64x128 pair": Options(64, 128, 4, 3, pair=True),
    "64x128 seldom": Options(64, 128, 4, 3, seldom=True),
    "64x128 128 registers": Options(64, 128, 4, 2, registers=128),
    "128x128x8 stages 3": Options(128, 128, 8, 3),
    "128x128x8 poly 1/4": Options(128, 128, 8, 2, poly=4),
    "64x256": Options(64, 256, 4, 2),
    "64x128 plain": Options(64, 128, 4, 3),
}
BACKWARD = {
    "tma 64x128x8": Options(64, 128, 8, 2),
    "tma 64x128x8 stages 3": Options(64, 128, 8, 3),
    "tma 64x128x8 128 registers": Options(64, 128, 8, 2, registers=128),
    "tma 128x128x8": Options(128, 128, 8, 2),
    "tma 64x64x4": Options(64, 64, 4, 2),
    "tma 128x64x4": Options(128, 64, 4, 2),
    "across 64x128x8": Options(64, 128, 8, 2, reduce="across"),
    "across 128x128x8": Options(128, 128, 8, 2, reduce="across"),
    "across 32x256x8": Options(32, 256, 8, 2, reduce="across"),
    "across 64x64x4": Options(64, 64, 4, 2, reduce="across"),
    "atomic 64x128x8": Options(64, 128, 8, 2, reduce="atomic"),
    "atomic 128x128x8": Options(128, 128, 8, 2, reduce="atomic"),
    "tma 64x128x8 poly 1/4": Options(64, 128, 8, 2, poly=4),
    "tma 128x128x8 poly 1/4": Options(128, 128, 8, 2, poly=4),
    "no dQ 128x128x8": Options(128, 128, 8, 2, reduce="none"),  # what the dQ part costs; its dQ is not checked
}
SPECIAL = {
    "special 128x64x4": Options(128, 64, 4, 3, special=True),
    "special 128x128x4": Options(128, 128, 4, 2, special=True),
    "special 128x128x4 poly 1/4": Options(128, 128, 4, 2, special=True, poly=4),
    "special 64x128x4": Options(64, 128, 4, 3, special=True),
}


class Attention:
    """One problem, [1, H, T, 64] bf16 causal: its tensors and the right answers of one head."""

    def __init__(self, heads: int, length: int, device: str = "cuda", head_dim: int = 64) -> None:
        draw = torch.Generator(device).manual_seed(0)
        shape = (1, heads, length, head_dim)
        self.q, self.k, self.v, self.g = (
            torch.randn(shape, generator=draw, device=device).bfloat16() for _ in range(4)
        )
        self.heads, self.length, self.d = heads, length, head_dim
        self.problem = Problem(True, None, head_dim**-0.5)
        self.scale = self.problem.scale * LOG2E
        leaves = [x[:, -1:].float().requires_grad_() for x in (self.q, self.k, self.v)]
        output = F.scaled_dot_product_attention(*leaves, is_causal=True)
        self.right = [output.detach(), *torch.autograd.grad(output, leaves, self.g[:, -1:].float())]

    def tiles(self, x: Tensor, rows: int) -> TensorDescriptor:
        flat = x.view(-1, self.d)
        return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, self.d])

    def fixed(self, options: Options) -> dict[str, Any]:
        return replace(options, d=self.d, length=self.length, wide=not self.q.is_cuda).launch()

    def forward(self, options: Options) -> tuple[Tensor, Tensor]:
        output, logsumexp = torch.empty_like(self.q), self.q.new_empty(self.q.shape[:-1], dtype=torch.float32)
        q = self.q if options.special else self.tiles(self.q, options.m)
        sources = (q, self.tiles(self.k, options.n), self.tiles(self.v, options.n))
        tiles = self.length // options.m
        grid = (tiles // 2 if options.pair else tiles, self.heads)
        forward_kernel[grid](*sources, output, logsumexp, self.length, self.scale, **self.fixed(options))
        return output, logsumexp

    def backward(self, output: Tensor, logsumexp: Tensor, options: Options) -> tuple[Tensor, ...]:
        dq, dk, dv = (torch.empty_like(self.q) for _ in range(3))
        wide, delta = torch.empty_like(dq, dtype=torch.float32), torch.empty_like(logsumexp)
        rows = self.heads * self.length
        delta_kernel[(rows // 32,)](output, self.g, delta, wide, D=self.d, ROWS=32)
        m, n = options.m, options.n
        target: Any = wide
        across = options.reduce == "across"
        if across:
            flat = wide.view(self.heads * self.d, self.length)
            target = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [self.d, m])
        elif options.reduce == "tma":
            target = self.tiles(wide, m)
        sources = (self.tiles(x, size) for x, size in ((self.q, m), (self.k, n), (self.v, n), (self.g, m)))
        arguments = (*sources, logsumexp, delta, target, dk, dv, self.length, self.scale)
        backward_kernel[(self.length // n, self.heads)](*arguments, **self.fixed(options))
        narrow_kernel[(rows // 32,)](wide, dq, self.problem.scale, self.length, D=self.d, ROWS=32, ACROSS=across)
        return dq, dk, dv


def _off(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right).norm() / right.norm())


def _check(found: tuple[Tensor, ...], right: list[Tensor], bound: float = 1e-2) -> float:
    error = max(_off(x[:, -1:], y) for x, y in zip(found, right, strict=True))
    if not error <= bound:
        raise ValueError(f"WRONG: off by {error:.1e}")
    return error


class Entry(NamedTuple):
    name: str
    run: Callable[[], Any]
    check: Callable[[Any], float]


def _warm(entry: Entry) -> tuple[Entry, float, str]:
    try:
        return entry, entry.check(entry.run()), ""
    except Exception as error:  # noqa: BLE001
        return entry, math.nan, f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"


def _turn(run: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds of `count` runs, queued while the GPU sleeps."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda._sleep(8_000_000)
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def table(title: str, entries: list[Entry], rounds: int, count: int = 8) -> None:
    """All in turns, round after round; the median, the fastest, and the ratio to the first."""
    began = time.monotonic()
    with ThreadPoolExecutor(12) as pool:  # a compilation holds one core for seconds
        list(pool.map(_warm, [e for e in entries if e.name != "cuDNN"]))
    torch.cuda.synchronize()
    checked = [_warm(entry) for entry in entries]
    print(f"\n{title}: compiled and checked in {time.monotonic() - began:.0f} s")
    times: dict[str, list[float]] = {entry.name: [] for entry, _, problem in checked if not problem}
    for _ in range(rounds):
        for entry, _, problem in checked:
            if not problem:
                times[entry.name] += _turn(entry.run, count)
    base = statistics.median(next(iter(times.values())))
    for entry, error, problem in checked:
        if problem:
            print(f"{entry.name:34} {problem}")
            continue
        middle = statistics.median(times[entry.name])
        print(
            f"{entry.name:34} {middle:8.4f} ms  fastest {min(times[entry.name]):8.4f}  {middle / base:6.3f}x  error {error:.1e}"
        )


def _cudnn(problem: Attention) -> tuple[Callable[[], Tensor], list[Tensor]]:
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*leaves, is_causal=True)

    return attend, leaves


def attention(what: str, only: list[str], rounds: int) -> None:
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    problem = Attention(16, 16384)
    attend, leaves = _cudnn(problem)
    shipped = lambda: launch_forward(problem.q, problem.k, problem.v, problem.problem)  # noqa: E731
    saved = shipped()
    back = lambda: launch_backward(problem.g, problem.q, problem.k, problem.v, *saved, problem.problem)  # noqa: E731
    kept = attend()
    peer = lambda: torch.autograd.grad(kept, leaves, problem.g, retain_graph=True)  # noqa: E731
    o_right, grads_right = problem.right[:1], problem.right[1:]
    if what in ("forward", "special"):
        chosen = FORWARD if what == "forward" else SPECIAL
        entries = [
            Entry("shipped", shipped, lambda x: _check(x[:1], o_right)),
            Entry("cuDNN", lambda: attend().detach(), lambda x: _check((x,), o_right)),
            *(
                Entry(name, lambda o=o: problem.forward(o), lambda x: _check(x[:1], o_right))
                for name, o in chosen.items()
            ),
        ]
    else:
        entries = [
            Entry("shipped", back, lambda x: _check(x, grads_right)),
            Entry("cuDNN", peer, lambda x: _check(x, grads_right)),
        ]
        for name, o in BACKWARD.items():
            skip = 1 if o.reduce == "none" else 0
            run = lambda o=o: problem.backward(*saved, o)  # noqa: E731
            entries.append(Entry(name, run, lambda x, skip=skip: _check(x[skip:], grads_right[skip:])))
    if what == "whole":
        entries = _whole(problem, attend, leaves, only)
        only = []
    kept_entries = [e for e in entries if not only or e.name in (*only, "shipped", "cuDNN")]
    table(f"attention {what}, 1 x 16 x 16384 x 64 bf16 causal", kept_entries, rounds)


def _whole(problem: Attention, attend: Callable[[], Tensor], leaves: list[Tensor], only: list[str]) -> list[Entry]:
    """Forward and backward. `only`: pairs 'forward name + backward name'; 'shipped' may stand for either."""

    def ours(names: str) -> tuple[Tensor, ...]:
        first, second = names.split(" + ")
        given = problem.q, problem.k, problem.v
        saved = launch_forward(*given, problem.problem) if first == "shipped" else problem.forward(FORWARD[first])
        if second == "shipped":
            return launch_backward(problem.g, *given, *saved, problem.problem)
        return problem.backward(*saved, BACKWARD[second])

    right = problem.right[1:]
    pairs = only or [f"shipped + {name}" for name in ("tma 64x128x8", "tma 128x128x8")]
    return [
        Entry("shipped + shipped", lambda: ours("shipped + shipped"), lambda x: _check(x, right)),
        Entry("cuDNN", lambda: torch.autograd.grad(attend(), leaves, problem.g), lambda x: _check(x, right)),
        *(Entry(name, lambda name=name: ours(name), lambda x: _check(x, right)) for name in pairs),
    ]


NORMS = {
    "split": Form(split=True),
    "split 1024": Form(1024, split=True),
    "twice": Form(twice=True),
    "stays 16/2": Form(split=True, resident=16, stages=2),
    "stays 32/2": Form(split=True, resident=32, stages=2),
    "stays 32/3": Form(split=True, resident=32, stages=3),
    "1024 32/3": Form(1024, split=True, resident=32, stages=3),
    "stays 64/1": Form(split=True, resident=64),
}
WIDTHS = (2560, 3072, 4096, 5120, 6144, 8192)


def _norm_entries(columns: int, only: list[str]) -> list[Entry]:
    x, weight = (torch.randn(size, device="cuda").bfloat16() for size in ((16384, columns), (columns,)))
    compiled = torch.compile(lambda x, w: F.rms_norm(x, (columns,), w, 1e-5), dynamic=False)
    copy = torch.empty_like(x)

    def check(y: Tensor) -> float:
        right = F.rms_norm(x[-512:].float(), (columns,), weight.float(), 1e-5)
        return _check((y[None, None, -512:],), [right[None, None]])

    return [
        Entry("compile", lambda: compiled(x, weight), check),
        Entry("copy", lambda: copy.copy_(x), lambda _: 0.0),
        Entry("shipped", lambda: launch_norm(x, None, weight, 1e-5)[0], check),
        *(
            Entry(name, lambda form=form: launch_norm(x, None, weight, 1e-5, form)[0], check)
            for name, form in NORMS.items()
            if not only or name in only
        ),
    ]


def norm(only: list[str], rounds: int, count: int = 15) -> None:
    """One line for each width, printed when it is measured: medians in ms."""
    began = time.monotonic()
    widths = {columns: _norm_entries(columns, only) for columns in WIDTHS}
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(_warm, [e for entries in widths.values() for e in entries if e.name != "compile"]))
    print(f"compiled in {time.monotonic() - began:.0f} s; rms_norm forward, 16384 rows, bf16, median ms", flush=True)
    print("columns " + " ".join(f"{entry.name:>10}" for entry in widths[WIDTHS[0]]), flush=True)
    problems = []
    for columns, entries in widths.items():
        checked = [_warm(entry) for entry in entries]
        times: dict[str, list[float]] = {entry.name: [] for entry in entries}
        for _ in range(rounds):
            for entry, _, problem in checked:
                times[entry.name] += [math.nan] if problem else _turn(entry.run, count)
        print(f"{columns:7} " + " ".join(f"{statistics.median(found):10.4f}" for found in times.values()), flush=True)
        problems += [f"{columns} {entry.name}: {problem}" for entry, _, problem in checked if problem]
    print("\n".join(problems) or "all right against fp32", f"\n{time.monotonic() - began:.0f} s in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["forward", "backward", "whole", "norm", "special"])
    parser.add_argument("--only", default="", help="variants, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this measures on a GPU, and torch sees none here\n")
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    only = [name for name in given.only.split(",") if name]
    norm(only, given.rounds) if given.what == "norm" else attention(given.what, only, given.rounds)


if __name__ == "__main__":
    main()
