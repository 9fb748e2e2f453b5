"""`tile-quantization`: where a matmul's tiles no longer fit into one wave, and what rows that are not aligned cost.

A multiprocessor works on one tile of the result at a time. As many tiles as there are multiprocessors make a wave, which takes as
long for one tile as for all: the time jumps where one more tile needs one more wave. A library picks another tile for every size;
so a kernel of our own, with the lecture's tile, is measured as well. Sizes are multiples of 16, so that alignment plays no part,
except for the one after each jump. Alignment is measured by itself: the layer y = x Wᵀ for K just above a power of two.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, Rule, bar, columns, line, table_of
from flopwise.experiments.rows import Interval, Row, Timed, by, fields, select, values
from flopwise.experiments.verdict import NOT_MEASURABLE, Check, holds, require, said, within
from flopwise.predict.flops import matmul_flops
from flopwise.records.experiment import Place
from flopwise.records.table import Table

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

LINE = "Where one tile more costs a wave more, computed from this chip's multiprocessors; and what unaligned rows cost."
CLAIM = (
    "A matmul that needs one more wave of tiles costs one more wave of time, and rows not aligned to 16 bytes are slow."
)
FIXED, LIBRARY = "fixed tile", "library"
TILE = TILE_M, TILE_N = 256, 128  # the lecture's
MOST_SMS = 10_000  # of a chip: a stored run may say anything
TILE_K, WARPS, STAGES = 64, 8, 3
A100_PLACE = 1792  # the lecture's, for 108 multiprocessors
NEXT = 16  # the next size whose rows are aligned
STEP = 64  # between sizes elsewhere
DIVISORS = (1, 2, 4, 8, 16, 32, 64)
GPU_LAYER, CPU_LAYER = 4096, 512  # rows, outputs and, about, inputs
ALIGNED_BYTES = 16  # the largest load of a thread, and what a tensor map asks of a row
JUMP_SHARE = 0.6  # of the expected jump, at least; at most the jump is that share of it
NO_JUMP = 1.2  # times the time before: less is none
SLOW = 0.8  # of the speed of aligned rows


class Square(Timed, frozen=True, kw_only=True, tag_field="part", tag="waves"):
    how: str
    n: int
    sms: int
    device_ns: float
    rate_flops_per_s: float


class Kernel(Row, frozen=True, tag_field="part", tag="kernels"):
    """The kernel that the library picks for a size; '' where the profiler cannot tell."""

    n: int
    kernel: str


class Aligned(Timed, frozen=True, kw_only=True, tag_field="part", tag="alignment"):
    k: int
    divisor: int
    side: int
    dtype: str
    each_bytes: int
    device_ns: float
    rate_flops_per_s: float


Rows = Sequence[Square | Kernel | Aligned]


def tiles(n: int, tile: tuple[int, int] = TILE) -> int:
    """Of an n × n result.

    >>> tiles(1792), tiles(1793)
    (98, 120)
    """
    return ceil(n / tile[0]) * ceil(n / tile[1])


def waves(n: int, sms: int, tile: tuple[int, int] = TILE) -> int:
    return ceil(tiles(n, tile) / sms)


def cliff(sms: int, wave: int = 1, tile: tuple[int, int] = TILE) -> int:
    """The largest size that needs no more than so many waves.

    >>> cliff(108), cliff(132), cliff(132, wave=2)
    (1792, 2048, 2816)
    """
    if not 0 < sms <= MOST_SMS:
        raise ValueError(f"a chip of {sms} multiprocessors")
    n = step = min(tile)
    while waves(n + step, sms, tile) <= wave:
        n += step
    return n


def tile_of(kernel: str) -> tuple[int, int] | None:
    """The tile that a library's kernel has in its name.

    >>> tile_of("nvjet_sm90_tst_96x128_64x6_2x1_v_bz_NNN"), tile_of("sm90_xmma_gemm_bf16_tn_n_tilesize128x256x64_tensor")
    ((96, 128), (128, 256))
    >>> tile_of("ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_tn"), tile_of("gemv2T_kernel")
    ((64, 64), None)
    """
    found = re.search(r"(?:_|tilesize)(\d{2,3})x(\d{2,3})(?=_|x)", kernel)
    return (int(found[1]), int(found[2])) if found else None


def measure(bench: "Bench") -> Iterator[Square | Kernel | Aligned]:
    if bench.on_gpu:
        yield from _waves(bench)
    yield from _alignment(bench)


def _waves(bench: "Bench") -> Iterator[Square | Kernel]:
    import torch

    sms = bench.chip.multi_processor_count
    places = (A100_PLACE, cliff(sms), cliff(sms, 2))
    around = {size for place in places for size in (place, place + 1, place + NEXT)}
    sweep = range(min(places) - 4 * STEP, max(places) + 4 * STEP, 4 * STEP if bench.quick else STEP)
    sizes = sorted(around | set(sweep))
    for n in sizes:
        bench.doing(f"{n} × {n}")
        a, b = (bench.randn(n, n, dtype="bf16") for _ in range(2))
        out = torch.empty_like(a)
        runs: dict[str, Callable[[], object]] = {LIBRARY: partial(torch.mm, a, b, out=out)}
        if n % NEXT == 0:
            runs[FIXED] = partial(fixed_tile_matmul, a, b, out)
        for how, run in runs.items():
            timing = bench.time(run, seconds=0.02 if bench.quick else 0.03)
            yield Square(how=how, n=n, sms=sms, **_rated(timing, matmul_flops(n, n, n)))
    bench.doing("the library's kernels")
    yield from map(Kernel, sizes, _kernel_names(bench, sizes))


def _rated(timing: Timed, flops: int) -> dict[str, Any]:
    return {"device_ns": timing.took_ns, "rate_flops_per_s": 1e9 * flops / timing.took_ns, **fields(timing)}


def _kernel_names(bench: "Bench", sizes: list[int]) -> list[str]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for n in sizes:
            square = torch.ones(n, n, device=bench.device, dtype=torch.bfloat16)
            torch.mm(square, square)
        bench.synchronise()
    products = [event for event in seen.events() or () if event.name == "aten::mm"]
    products.sort(key=lambda event: event.time_range.start)
    if len(products) != len(sizes):
        return [""] * len(sizes)
    return [max(p.kernels, key=lambda kernel: kernel.duration).name if p.kernels else "" for p in products]


def _alignment(bench: "Bench") -> Iterator[Aligned]:
    import torch

    bench.fp32_matmul()
    side, precision, name = (GPU_LAYER, "bf16", "bfloat16") if bench.on_gpu else (CPU_LAYER, "fp32", "float32")
    for divisor in DIVISORS:
        k = side + divisor  # divisible by this power of two and by no larger one
        bench.doing(f"K = {k}")
        x, weight = (bench.randn(side, k, dtype=precision) for _ in range(2))
        run = partial(torch.mm, x, weight.t(), out=x.new_empty(side, side))
        timing = _rated(bench.time(run, seconds=0.03 if bench.quick else 0.1), matmul_flops(side, k, side))
        yield Aligned(k=k, divisor=divisor, side=side, dtype=name, each_bytes=x.itemsize, **timing)


@cache
def tile_kernel() -> Any:
    """Triton's, made when it is needed: the list of experiments is shown where there is no Triton."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def tile_product(a, b, c, n, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
        """One tile of c = a b, all n × n and row by row: reads M rows of a and N columns of b, writes M × N numbers."""
        across = tl.cdiv(n, N)
        row = tl.program_id(0) // across * M + tl.arange(0, M)
        column = tl.program_id(0) % across * N + tl.arange(0, N)
        total = tl.zeros((M, N), dtype=tl.float32)
        for start in range(0, n, K):
            inner = start + tl.arange(0, K)
            in_a = (row[:, None] < n) & (inner[None, :] < n)
            in_b = (inner[:, None] < n) & (column[None, :] < n)
            left = tl.load(a + row[:, None] * n + inner[None, :], mask=in_a, other=0.0)
            right = tl.load(b + inner[:, None] * n + column[None, :], mask=in_b, other=0.0)
            total = tl.dot(left, right, total)
        inside = (row[:, None] < n) & (column[None, :] < n)
        tl.store(c + row[:, None] * n + column[None, :], total.to(c.dtype.element_ty), mask=inside)

    return tile_product


def fixed_tile_matmul(a: Any, b: Any, out: Any, tile: tuple[int, int, int] = (TILE_M, TILE_N, TILE_K)) -> None:
    """out = a b of square matrices, by one block of threads for each tile."""
    n = a.shape[0]
    tile_kernel()[(tiles(n, tile[:2]),)](a, b, out, n, *tile, num_warps=WARPS, num_stages=STAGES)


def with_waves(rows: Rows) -> list[dict[str, Any]]:
    """The square matmuls with their tiles and waves: those of the fixed tile, and of the one in a library kernel's name."""
    kernels = by(select(rows, Kernel), "n")
    found = []
    for row in sorted(select(rows, Square), key=attrgetter("how", "n")):
        tile = TILE if row.how == FIXED else tile_of(kernels[row.n].kernel) if row.n in kernels else None
        derived: dict[str, Any] = {"tile": "?", "tiles": None, "waves": None, "last_share": None}
        if tile:
            count, in_waves = tiles(row.n, tile), waves(row.n, row.sms, tile)
            derived = {"tile": f"{tile[0]} × {tile[1]}", "tiles": count, "waves": in_waves}
            derived["last_share"] = (count - (in_waves - 1) * row.sms) / row.sms
        found.append(fields(row) | derived)
    return found


def times_by_size(rows: Rows, how: str) -> dict[int, Square]:
    return by((row for row in sorted(select(rows, Square), key=attrgetter("n")) if row.how == how), "n")


def largest_jump(sizes: Mapping[int, Square]) -> tuple[int, int, float]:
    """Between which neighbouring sizes the time grows most, and by how many times."""
    jumps = [(a, b, sizes[b].device_ns / sizes[a].device_ns) for a, b in pairwise(sizes)]
    return max(jumps, key=lambda jump: jump[2], default=(0, 0, 1.0))


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    aligned = select(rows, Aligned)
    complete = {row.divisor for row in aligned} == set(DIVISORS)
    alignment, slow = _alignment_cost(aligned) if complete else ("Alignment was not measured at every divisor.", None)
    no_waves = f"a CPU has no multiprocessors that work in waves. {alignment}"
    yield require("waves", place.on_gpu, no_waves, NOT_MEASURABLE)
    sizes = times_by_size(rows, FIXED)
    sms = next((row.sms for row in select(rows, Square)), 1)
    places = [cliff(sms), cliff(sms, 2)]
    there = {size for at in places for size in (at, at + NEXT)} <= set(sizes)
    missing = f"the matmul with a fixed tile was not measured on both sides of two jumps. {alignment}"
    yield require("both sides of two jumps", there and slow, missing)
    jumps = {f"after {at}": sizes[at + NEXT].device / sizes[at].device for at in places}
    expected = {f"after {at}": waves(at + NEXT, sms) / waves(at, sms) for at in places}
    grows = " and ".join(f"× {one.middle:.2f} {at} (× {expected[at]:.2g} expected)" for at, one in jumps.items())
    before, after, by_times = largest_jump(sizes)
    yield said(
        f"{sms} multiprocessors and tiles of {TILE_M} × {TILE_N}: the first jump must come after {places[0]} "
        f"({tiles(places[0])} tiles, then {tiles(places[0] + NEXT)}). The time grows {grows}; "
        f"the largest jump is × {by_times:.2f}, from {before} to {after}."
    )
    # A jump of the expected size is 1 here.
    of_expected = {at: _less_one(one, expected[at] - 1) for at, one in jumps.items()}
    wave = within("one more wave", of_expected, JUMP_SHARE, 1 / JUMP_SHARE)
    yield wave
    yield holds("the largest jump is the first", before == places[0])
    yield said(_others(rows, places[0]))
    yield said(alignment)
    unaligned = within("unaligned rows are slow", {"at best": slow} if slow else {}, most=SLOW)
    yield unaligned
    yield Check("", text="The GPU waited for the host, so that its times are not exact.", if_uncertain=True)


def _less_one(ratio: Interval, by: float) -> Interval:
    """What a ratio has above one, over what it should have."""
    return Interval((ratio.middle - 1) / by, (ratio.low - 1) / by, (ratio.high - 1) / by)


def _alignment_cost(rows: Sequence[Aligned]) -> tuple[str, Interval]:
    """The best speed of rows that are not aligned as a share of the best of those that are, described."""
    fast, slow = (
        max(
            (row for row in rows if (row.divisor * row.each_bytes >= ALIGNED_BYTES) == aligned),
            key=attrgetter("rate_flops_per_s"),
        )
        for aligned in (True, False)
    )
    share = (fast.device / slow.device).around(slow.rate_flops_per_s / fast.rate_flops_per_s)
    rates = ", ".join(f"{row.divisor}: {units.rate(row.rate_flops_per_s, 'FLOP/s')}" for row in rows)
    text = f"By the largest power of two that divides K: {rates}; without alignment to {ALIGNED_BYTES} bytes at best"
    return f"{text} {units.percent(share.middle, 0)} of the speed with it.", share


def _others(rows: Rows, at: int) -> str:
    """The lecture's place, and what a library makes of both."""
    texts = []
    fixed, library = ({n: row.device_ns for n, row in times_by_size(rows, how).items()} for how in (FIXED, LIBRARY))
    if at != A100_PLACE and {A100_PLACE, A100_PLACE + NEXT} <= set(fixed):
        lecture = fixed[A100_PLACE + NEXT] / fixed[A100_PLACE]
        jump = "no jump" if lecture < NO_JUMP else "a jump"
        texts.append(f"After the A100's {A100_PLACE} there is {jump} here (× {lecture:.2f}).")
    if {at, at + 1, at + NEXT} <= set(library):
        texts.append(
            f"The library, which picks its tile, takes × {library[at + NEXT] / library[at]:.2f} from {at} to {at + NEXT}, and "
            f"× {library[at + 1] / library[at]:.2f} to {at + 1}, whose rows are not aligned."
        )
    return " ".join(texts)


def draw(rows: Rows, place: Place) -> list[Picture]:
    pictures = []
    if squares := [row for row in with_waves(rows) if row["n"] % NEXT == 0]:
        here = [cliff(squares[0]["sms"], wave) for wave in (1, 2)]
        rules = [Rule("x", at, f"{at}, computed") for at in here]
        rules += [] if A100_PLACE in here else [Rule("x", A100_PLACE, f"{A100_PLACE}, A100")]
        size = Axis("n", "rows and columns")
        shared: dict[str, Any] = {"colour": "how", "rules": tuple(rules)}
        pictures = [
            line(squares, size, Axis("device_ns", "time"), **shared).titled(
                "Time of square matmuls", "With a fixed tile the time is a staircase: one step for each wave."
            ),
            line(squares, size, Axis("rate_flops_per_s", "rate"), **shared).titled(
                "Rate of square matmuls", "After each step the last wave leaves most multiprocessors idle."
            ),
        ]
    if aligned := select(rows, Aligned):
        first = aligned[0]
        rates = bar(values(aligned), Axis("divisor", "divides K"), Axis("rate_flops_per_s", "rate"))
        note = f"aligned to {ALIGNED_BYTES} bytes from {ALIGNED_BYTES // first.each_bytes} on."
        title = "Rate by the largest power of two that divides K"
        pictures.append(rates.titled(title, f"Rows of K numbers, {first.dtype}: {note}"))
    return pictures


def tabulate(rows: Rows, place: Place) -> list[Table]:
    tables = []
    if squares := with_waves(rows):
        headings = columns(how="what", n="size") | columns("tile", "tiles", "waves", last_share="last wave full to")
        headings |= columns(device_ns="time", rate_flops_per_s="rate")
        note = f"{squares[0]['sms']} multiprocessors; the library's tile is read from its kernel's name"
        tables.append(table_of("square matmuls in bf16", headings, squares, (note,)))
    if aligned := select(rows, Aligned):
        headings = columns(divisor="divides K", k="K", device_ns="time", rate_flops_per_s="rate")
        side, dtype = aligned[0].side, aligned[0].dtype
        tables.append(table_of(f"{side} × K times K × {side}, {dtype}", headings, values(aligned)))
    return tables


KINDS = (Square, Kernel, Aligned)
EXPERIMENT = Experiment(12, "tile-quantization", LINE, CLAIM, KINDS, measure, judge, draw, tabulate)
