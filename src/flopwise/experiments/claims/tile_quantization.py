"""`tile-quantization`: where a matmul's tiles no longer fit into one wave, and what rows that are not aligned cost.

A matmul is cut into tiles of its result; a multiprocessor works on one at a time. As many as there are multiprocessors make a
wave, and a wave takes as long for one tile as for all. So the time jumps where one more tile needs one more wave; where that is
follows from the tile and the count of multiprocessors. The lecture's tile is 256 × 128, and its A100 jumps from 1792 to 1793.
A library picks another tile for every size; so a kernel of our own, whose tile is fixed, is measured beside it. Sizes are
multiples of 16, so that alignment plays no part, except for the one after each jump, as the lecture has it. Alignment is
measured by itself: the layer y = x Wᵀ, whose rows have K numbers, for K just above a power of two.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import (
    CONFIRMED,
    INCONCLUSIVE,
    NOT_MEASURABLE,
    REFUTED,
    Experiment,
    Picture,
    Row,
    Rows,
    Rule,
    TableOf,
    Verdict,
    part,
)
from flopwise.experiments.steadiness import GPU, Ratio, times, together
from flopwise.predict.flops import matmul_flops
from flopwise.records.experiment import Place

if TYPE_CHECKING:
    from flopwise.experiments.bench import Bench

CLAIM = (
    "A matmul that needs one more wave of tiles costs one more wave of time, and rows not aligned to 16 bytes are slow."
)
WAVES, KERNELS, ALIGNMENT = "waves", "kernels", "alignment"
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
JUMP_SHARE = 0.6  # of the jump to expect, at least; at most the jump is that share of it
NO_JUMP = 1.2  # times the time before: less is none
SLOW = 0.8  # of the speed of aligned rows


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


def measure(bench: "Bench") -> Iterator[Row]:
    if bench.on_gpu:
        yield from _waves(bench)
    yield from _alignment(bench)


def _waves(bench: "Bench") -> Iterator[Row]:
    import torch

    sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
    places = (A100_PLACE, cliff(sms), cliff(sms, 2))
    around = {size for place in places for size in (place, place + 1, place + NEXT)}
    sweep = range(min(places) - 4 * STEP, max(places) + 4 * STEP, 4 * STEP if bench.quick else STEP)
    sizes = sorted(around | set(sweep))
    seconds = 0.02 if bench.quick else 0.03
    for n in sizes:
        bench.doing(f"{n} × {n}")
        a, b = (torch.randn(n, n, device=bench.device).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        runs: dict[str, Callable[[], object]] = {LIBRARY: partial(torch.mm, a, b, out=out)}
        if n % NEXT == 0:
            runs[FIXED] = partial(fixed_tile_matmul, a, b, out)
        for how, run in runs.items():
            timing = bench.time(run, seconds=seconds)
            yield {"part": WAVES, "how": how, "n": n, "sms": sms, **_rated(timing.device_ns, n, n, n), **timing.row()}
    bench.doing("the library's kernels")
    yield from ({"part": KERNELS, "n": n, "kernel": name} for n, name in zip(sizes, _names(bench, sizes), strict=True))


def _rated(device_ns: float, m: int, k: int, n: int) -> Row:
    return {"device_ns": device_ns, "rate_flops_per_s": 1e9 * matmul_flops(m, k, n) / device_ns}


def _names(bench: "Bench", sizes: list[int]) -> list[str]:
    """The kernel that the library picks for each size; '' where the profiler cannot tell."""
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


def _alignment(bench: "Bench") -> Iterator[Row]:
    import torch

    from flopwise.lm.precision import apply_fp32_matmul
    from flopwise.spec.recipe import Recipe

    apply_fp32_matmul(Recipe(precision="fp32"))
    side = GPU_LAYER if bench.on_gpu else CPU_LAYER
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    for divisor in DIVISORS:
        k = side + divisor  # divisible by this power of two and by no larger one
        bench.doing(f"K = {k}")
        x, weight = (torch.randn(side, k, device=bench.device).to(dtype) for _ in range(2))
        out = torch.empty(side, side, device=bench.device, dtype=dtype)
        run = partial(torch.mm, x, weight.t(), out=out)
        timing = bench.time(run, seconds=0.03 if bench.quick else 0.1)
        yield {
            "part": ALIGNMENT, "k": k, "divisor": divisor, "side": side, "dtype": str(dtype).removeprefix("torch."),
            "each_bytes": dtype.itemsize, **_rated(timing.device_ns, side, k, side), **timing.row(),
        }  # fmt: skip


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
            left = tl.load(
                a + row[:, None] * n + inner[None, :], mask=(row[:, None] < n) & (inner[None, :] < n), other=0.0
            )
            right = tl.load(
                b + inner[:, None] * n + column[None, :], mask=(inner[:, None] < n) & (column[None, :] < n), other=0.0
            )
            total = tl.dot(left, right, total)
        inside = (row[:, None] < n) & (column[None, :] < n)
        tl.store(c + row[:, None] * n + column[None, :], total.to(c.dtype.element_ty), mask=inside)

    return tile_product


def fixed_tile_matmul(a: Any, b: Any, out: Any, tile: tuple[int, int, int] = (TILE_M, TILE_N, TILE_K)) -> None:
    """out = a b of square matrices, by one block of threads for each tile."""
    n = a.shape[0]
    tile_kernel()[(tiles(n, tile[:2]),)](a, b, out, n, *tile, num_warps=WARPS, num_stages=STAGES)


def sized(rows: Rows) -> list[Row]:
    """The measured matmuls with their tiles and waves: those of the fixed tile, and of the one in a library kernel's name."""
    names = {row["n"]: row["kernel"] for row in part(rows, KERNELS)}
    told = []
    for row in sorted(part(rows, WAVES), key=lambda row: (row["how"], row["n"])):
        kernel = names.get(row["n"], "") if row["how"] == LIBRARY else ""
        tile = tile_of(kernel) if row["how"] == LIBRARY else TILE
        more: Row = {"tile": "?", "tiles": None, "waves": None, "last_share": None}
        if tile:
            many, in_waves = tiles(row["n"], tile), waves(row["n"], row["sms"], tile)
            full = many - (in_waves - 1) * row["sms"]
            more = {"tile": f"{tile[0]} × {tile[1]}", "tiles": many, "waves": in_waves, "last_share": full / row["sms"]}
        told.append({**row, **more})
    return told


def jump(rows: Rows, how: str, before: int, after: int) -> float | None:
    """How many times as long the matmul of one size takes as that of another; None where one was not measured."""
    times = {row["n"]: row["device_ns"] for row in part(rows, WAVES) if row["how"] == how}
    return times[after] / times[before] if {before, after} <= set(times) else None


def largest_jump(rows: Rows) -> tuple[int, int, float] | None:
    """Between which neighbouring sizes the time of the fixed tile grows most, and by how many times."""
    times = sorted((row["n"], row["device_ns"]) for row in part(rows, WAVES) if row["how"] == FIXED)
    found = [(a, b, after / before) for (a, before), (b, after) in pairwise(times)]
    return max(found, key=lambda one: one[2], default=None)


def _slow_share(rows: Rows) -> tuple[Ratio, str] | None:
    """The best speed of rows that are not aligned as a share of the best of those that are, and a sentence. None unless every
    divisor was measured."""
    found = part(rows, ALIGNMENT)
    aligned = [row for row in found if row["divisor"] * row["each_bytes"] >= ALIGNED_BYTES]
    other = [row for row in found if row["divisor"] * row["each_bytes"] < ALIGNED_BYTES]
    if {row["divisor"] for row in found} != set(DIVISORS):
        return None
    best, odd = (max(some, key=lambda row: row["rate_flops_per_s"]) for some in (aligned, other))
    share = times(best, odd).around(odd["rate_flops_per_s"] / best["rate_flops_per_s"])
    rates = ", ".join(f"{row['divisor']}: {units.rate(row['rate_flops_per_s'], 'FLOP/s')}" for row in found)
    return share, (
        f"By the largest power of two that divides K: {rates}; without alignment to {ALIGNED_BYTES} bytes at best "
        f"{units.percent(share.middle, 0)} of the speed with it."
    )


def judge(rows: Rows, place: Place) -> Verdict:
    slow = _slow_share(rows)
    said = slow[1] if slow else "Alignment was not measured at every divisor."
    if not place.on_gpu:
        return Verdict(NOT_MEASURABLE, f"a CPU has no multiprocessors that work in waves. {said}")
    measured = part(rows, WAVES)
    sms = measured[0]["sms"] if measured else 1
    found = largest_jump(rows)
    places = [cliff(sms), cliff(sms, 2)]
    jumps = [jump(rows, FIXED, at, at + NEXT) for at in places]
    if found is None or None in jumps or slow is None:
        return Verdict(
            INCONCLUSIVE, f"the matmul with a fixed tile was not measured on both sides of two jumps. {said}"
        )
    expected = [waves(at + NEXT, sms) / waves(at, sms) for at in places]
    known = [_ratio(rows, at) for at in places]
    holds = together(
        *(
            one.within(1 + JUMP_SHARE * (to - 1), 1 + (to - 1) / JUMP_SHARE)
            for one, to in zip(known, expected, strict=True)
        ),
        found[0] == places[0],
        slow[0].within(most=SLOW),
    )
    grows = " and ".join(
        f"× {one:.2f} after {at} (× {to:.2g} expected)" for one, at, to in zip(jumps, places, expected, strict=True)
    )
    told = (
        f"{sms} multiprocessors and tiles of {TILE_M} × {TILE_N}: the first jump must come after {places[0]} "
        f"({tiles(places[0])} tiles, then {tiles(places[0] + NEXT)}). The time grows {grows}; "
        f"the largest jump is × {found[2]:.2f}, from {found[0]} to {found[1]}."
    )
    word = INCONCLUSIVE if holds is None else CONFIRMED if holds else REFUTED
    waited = " The GPU waited for the host, so that its times are not exact." if holds is None else ""
    return Verdict(word, f"{told}{waited} {_others(rows, sms, places[0])}{said}")


def _ratio(rows: Rows, at: int) -> Ratio:
    """The jump after a size, and between what it lies."""
    by_size = {row["n"]: row for row in part(rows, WAVES) if row["how"] == FIXED}
    before, after = by_size[at], by_size[at + NEXT]
    return times(after, before, "device_ns") if before.get(GPU) is None else times(after, before, GPU)


def _others(rows: Rows, sms: int, at: int) -> str:
    """The lecture's place, and what a library makes of both."""
    told = ""
    if (lecture := jump(rows, FIXED, A100_PLACE, A100_PLACE + NEXT)) and at != A100_PLACE:
        none = "no jump" if lecture < NO_JUMP else "a jump"
        told = f"After the A100's {A100_PLACE} there is {none} here (× {lecture:.2f}). "
    aligned, odd = (jump(rows, LIBRARY, at, at + more) for more in (NEXT, 1))
    if aligned and odd:
        told += (
            f"The library, which picks its tile, takes × {aligned:.2f} from {at} to {at + NEXT}, and × {odd:.2f} to {at + 1}, "
            "whose rows are not aligned. "
        )
    return told


def draw(rows: Rows, place: Place) -> list[Picture]:
    pictures = []
    if found := [row for row in sized(rows) if row["n"] % NEXT == 0]:
        sms = found[0]["sms"]
        here = [cliff(sms), cliff(sms, 2)]
        rules = tuple(Rule("x", at, f"{at}, computed") for at in here)
        rules += () if A100_PLACE in here else (Rule("x", A100_PLACE, f"{A100_PLACE}, A100"),)
        shared: dict[str, Any] = {
            "kind": "line",
            "rows": found,
            "x": "n",
            "colour": "how",
            "x_title": "rows and columns",
        }
        pictures = [
            Picture(
                title="Time of square matmuls", caption="With a fixed tile the time is a staircase: one step for each wave.",
                y="device_ns", y_title="time", rules=rules, **shared,
            ),
            Picture(
                title="Rate of square matmuls", caption="After each step the last wave leaves most multiprocessors idle.",
                y="rate_flops_per_s", y_title="rate", rules=rules, **shared,
            ),
        ]  # fmt: skip
    if aligned := part(rows, ALIGNMENT):
        pictures.append(
            Picture(
                title="Rate by the largest power of two that divides K", kind="bar", rows=aligned, x="divisor",
                y="rate_flops_per_s", x_title="divides K", y_title="rate",
                caption=f"Rows of K numbers, {aligned[0]['dtype']}: aligned to {ALIGNED_BYTES} bytes from "
                f"{ALIGNED_BYTES // aligned[0]['each_bytes']} on.",
            )
        )  # fmt: skip
    return pictures


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    tables = []
    if found := sized(rows):
        columns = {
            "how": "what", "n": "size", "tile": "tile", "tiles": "tiles", "waves": "waves", "last_share": "last wave full to",
            "device_ns": "time", "rate_flops_per_s": "rate",
        }  # fmt: skip
        note = f"{found[0]['sms']} multiprocessors; the library's tile is read from its kernel's name"
        tables.append(TableOf("square matmuls in bf16", columns, found, (note,)))
    if aligned := part(rows, ALIGNMENT):
        columns = {"divisor": "divides K", "k": "K", "device_ns": "time", "rate_flops_per_s": "rate"}
        side = aligned[0]["side"]
        tables.append(TableOf(f"{side} × K times K × {side}, {aligned[0]['dtype']}", columns, aligned))
    return tables


EXPERIMENT = Experiment(
    name="tile-quantization",
    number=12,
    line="Where one tile more costs a wave more, computed from this chip's multiprocessors; and what unaligned rows cost.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
