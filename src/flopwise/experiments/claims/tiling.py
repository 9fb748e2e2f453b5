"""`tiling`: a matrix product in tiles reads its inputs from memory less often.

Every number of an n × n product needs n numbers of each input. Computed on its own, it asks memory for all of them: each input
is read n times. A tile of T × T results needs T rows and T columns, loads them into near memory piece by piece, and uses each
number T times from there: each input is read n/T times. What is asked of memory is counted from these loops, not measured; the
time is measured. On a GPU near memory is shared memory and, for the larger tiles, registers; on a CPU it is a small array that
its nearest cache holds.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import INCONCLUSIVE, Experiment, Picture, Row, Rows, Rule, TableOf, Verdict
from flopwise.experiments.steadiness import left_open, times, together, word
from flopwise.records.experiment import Place
from flopwise.spec.gpu import find_gpu

if TYPE_CHECKING:
    from torch import Tensor

    from flopwise.experiments.bench import Bench

CLAIM = (
    "A matmul in tiles, which uses what it loaded many times from near memory, is several times faster than a naive one at its "
    "best tile, and slower at none."
)
SCATTERED, NAIVE, TILED, LIBRARY = "naive, not coalesced", "naive", "tiles of", "the library's"
NUMBER = 4  # bytes: fp32
TILES = {
    16: (16, 1),
    32: (32, 1),
    64: (16, 4),
    128: (16, 8),
}  # T: the depth of a step, and results a thread has in each direction
CPU_TILES = (8, 16, 32, 64)
SIDE, QUICK_SIDE = 4096, 2048
CPU_SIDE, CPU_QUICK_SIDE, CPU_ROWS, CPU_QUICK_ROWS = (
    2048,
    1024,
    64,
    32,
)  # on the CPU some rows of the product are enough
NAIVE_THREADS = 256
SEVERAL, HARDLY, SLOWER = 2.0, 1.2, 0.9  # times as fast
WRONG = (
    1e-4  # off by this share of the largest number: fp32 sums of a few thousand numbers are off by a hundredth of it
)

SOURCE = """
// One thread for one number of c. The threads of a warp stand in a row of c: b is read in whole rows, a by all from one place.
extern "C" __global__ void naive(const float* a, const float* b, float* c, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, row = at / n, column = at % n;
    float sum = 0.0f;
    for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];
    c[row * n + column] = sum;
}

// The same, but the threads of a warp stand in a column of c: each reads a row of a of its own.
extern "C" __global__ void scattered(const float* a, const float* b, float* c, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, row = at % n, column = at / n;
    float sum = 0.0f;
    for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + column];
    c[row * n + column] = sum;
}

// One block for a tile of c, in steps of DEPTH numbers of k; each thread keeps EACH by EACH sums in registers.
template <int TILE, int DEPTH, int EACH>
__device__ __forceinline__ void product(const float* a, const float* b, float* c, int n) {
    constexpr int SIDE = TILE / EACH, THREADS = SIDE * SIDE;
    __shared__ float left[TILE][DEPTH + 1], right[DEPTH][TILE];  // + 1: rows begin in different banks
    int tiles = n / TILE, row = blockIdx.x / tiles * TILE, column = blockIdx.x % tiles * TILE;
    int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    float sums[EACH][EACH] = {};
    for (int start = 0; start < n; start += DEPTH) {
        #pragma unroll
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            left[i / DEPTH][i % DEPTH] = a[(row + i / DEPTH) * n + start + i % DEPTH];
            right[i / TILE][i % TILE] = b[(start + i / TILE) * n + column + i % TILE];
        }
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float down[EACH], across[EACH];
            #pragma unroll
            for (int i = 0; i < EACH; ++i) down[i] = left[y + i * SIDE][k], across[i] = right[k][x + i * SIDE];
            #pragma unroll
            for (int i = 0; i < EACH; ++i)
                #pragma unroll
                for (int j = 0; j < EACH; ++j) sums[i][j] += down[i] * across[j];
        }
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < EACH; ++i)
        #pragma unroll
        for (int j = 0; j < EACH; ++j) c[(row + y + i * SIDE) * n + column + x + j * SIDE] = sums[i][j];
}
""" + "".join(
    f'extern "C" __global__ void __launch_bounds__({(tile // each) ** 2}) tiles_{tile}'
    f"(const float* a, const float* b, float* c, int n) {{ product<{tile}, {depth}, {each}>(a, b, c, n); }}\n"
    for tile, (depth, each) in TILES.items()
)

# The GPU's loops, one after the other on one core. Without vector instructions, which only some of the loops would get.
HOST_FLAGS = ("-O2", "-fno-tree-vectorize")
HOST_SOURCE = """
void naive(const float *a, const float *b, float *c, long rows, long n) {
    for (long i = 0; i < rows; ++i)
        for (long j = 0; j < n; ++j) {
            float sum = 0.0f;
            for (long k = 0; k < n; ++k) sum += a[i * n + k] * b[k * n + j];
            c[i * n + j] = sum;
        }
}

#define TILED(T)                                                                                           \\
    static void tile_##T(const float *a, const float *b, float *c, long n) {                               \\
        float left[T][T], right[T][T], sums[T][T];                                                         \\
        for (int i = 0; i < T; ++i) for (int j = 0; j < T; ++j) sums[i][j] = 0.0f;                         \\
        for (long start = 0; start < n; start += T) {                                                      \\
            for (int i = 0; i < T; ++i) for (int k = 0; k < T; ++k) {                                      \\
                left[i][k] = a[i * n + start + k];                                                         \\
                right[i][k] = b[(start + i) * n + k];                                                      \\
            }                                                                                              \\
            for (int i = 0; i < T; ++i) for (int j = 0; j < T; ++j) {                                      \\
                float sum = sums[i][j];                                                                    \\
                for (int k = 0; k < T; ++k) sum += left[i][k] * right[k][j];                               \\
                sums[i][j] = sum;                                                                          \\
            }                                                                                              \\
        }                                                                                                  \\
        for (int i = 0; i < T; ++i) for (int j = 0; j < T; ++j) c[i * n + j] = sums[i][j];                 \\
    }                                                                                                      \\
    void tiles_##T(const float *a, const float *b, float *c, long rows, long n) {                          \\
        for (long i = 0; i < rows; i += T)                                                                 \\
            for (long j = 0; j < n; j += T) tile_##T(a + i * n, b + j, c + i * n + j, n);                  \\
    }
""" + "\n".join(f"TILED({tile})" for tile in CPU_TILES)


def asked_bytes(rows: int, side: int, tile: int = 1) -> int:
    """What the loops ask memory for: T rows and T columns for each tile of T × T, and the product, written once.

    >>> asked_bytes(4096, 4096) / 1e9, asked_bytes(4096, 4096, 32) / 1e9    # naive, and in tiles of 32
    (549.822922752, 17.246978048)
    """
    return NUMBER * (2 * rows * side * side // tile + rows * side)


def measure(bench: "Bench") -> Iterator[Row]:
    import torch

    from flopwise.lm.precision import apply_fp32_matmul
    from flopwise.spec.recipe import Recipe

    apply_fp32_matmul(Recipe(precision="fp32"))
    side, rows = _size(bench)
    a, b = torch.rand(rows, side, device=bench.device), torch.rand(side, side, device=bench.device)
    c, right = torch.empty_like(a), a @ b
    ways = _on_gpu(bench, a, b, c) if bench.on_gpu else _on_cpu(a, b, c)
    ways[LIBRARY] = (None, partial(torch.mm, a, b, out=c))
    for way, (tile, run) in ways.items():
        bench.doing(f"{way}, {rows} × {side} × {side}")
        c.fill_(float("nan"))  # numbers that a kernel leaves out must not be those of the one before
        timing = bench.time(run, seconds=0.05 if bench.quick and bench.on_gpu else 0.1)
        yield {
            "way": way, "tile": tile, "rows": rows, "side": side,
            "asked_bytes": None if tile is None else asked_bytes(rows, side, tile),
            "done_flops_per_s": 2 * rows * side * side / timing.device_ns * 1e9,
            "off": float(torch.nan_to_num((c - right).abs().max() / right.max(), nan=1.0)),
            "device_ns": timing.device_ns, **timing.row(),
        }  # fmt: skip


def _size(bench: "Bench") -> tuple[int, int]:
    """The side of b, and the rows of a and c."""
    if bench.on_gpu:
        return (QUICK_SIDE, QUICK_SIDE) if bench.quick else (SIDE, SIDE)
    return (CPU_QUICK_SIDE, CPU_QUICK_ROWS) if bench.quick else (CPU_SIDE, CPU_ROWS)


Ways = dict[str, tuple[int | None, Callable[[], object]]]


def _on_gpu(bench: "Bench", a: "Tensor", b: "Tensor", c: "Tensor") -> Ways:
    from flopwise.kernels import nvrtc

    n, names = len(a), ("scattered", "naive", *(f"tiles_{tile}" for tile in TILES))
    scattered, naive, *tiled = nvrtc.load(SOURCE, "tiling.cu", names, bench.device.index or 0)
    given = (nvrtc.pointer(a), nvrtc.pointer(b), nvrtc.pointer(c), ctypes.c_int(n))
    ways: Ways = {
        way: (1, partial(kernel, n * n // NAIVE_THREADS, NAIVE_THREADS, *given))
        for way, kernel in ((SCATTERED, scattered), (NAIVE, naive))
    }
    for (tile, (_, each)), kernel in zip(TILES.items(), tiled, strict=True):
        ways[f"{TILED} {tile}"] = (tile, partial(kernel, (n // tile) ** 2, (tile // each) ** 2, *given))
    return ways


def _on_cpu(a: "Tensor", b: "Tensor", c: "Tensor") -> Ways:
    from flopwise.experiments.native import compile_host

    library = compile_host(HOST_SOURCE, "a matmul written by hand", HOST_FLAGS)
    rows, n = a.shape
    given = (*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, c)), ctypes.c_long(rows), ctypes.c_long(n))
    ways: Ways = {NAIVE: (1, partial(library["naive"], *given))}
    for tile in (tile for tile in CPU_TILES if rows % tile == 0):
        ways[f"{TILED} {tile}"] = (tile, partial(library[f"tiles_{tile}"], *given))
    return ways


def _bandwidth(place: Place) -> float | None:
    """The memory's, as the vendor states it."""
    chip = find_gpu(place.name) if place.on_gpu else None
    return chip.bandwidth_bytes_s if chip else None


def _with_rates(rows: Rows) -> list[Row]:
    """With the rate at which what was asked came, and how much faster than the naive one it was."""
    naive = next((row["device_ns"] for row in rows if row["way"] == NAIVE), None)
    return [
        {
            **row,
            "asked_bytes_per_s": row["asked_bytes"] / row["device_ns"] * 1e9 if row["asked_bytes"] else None,
            "faster": f"{naive / row['device_ns']:.2f} ×" if naive else None,
        }
        for row in rows
    ]


def judge(rows: Rows, place: Place) -> Verdict:
    """By the times: the bytes asked for follow from the loops and cannot be otherwise, whatever was measured."""
    ways = {row["way"]: row for row in rows}
    if wrong := [row["way"] for row in rows if row["off"] > WRONG]:
        return Verdict(INCONCLUSIVE, f"wrong products: {', '.join(wrong)}.")
    tiled = [row for row in rows if row["way"].startswith(TILED)]
    if (
        NAIVE not in ways
        or LIBRARY not in ways
        or not tiled
        or (place.on_gpu and {row["tile"] for row in tiled} != set(TILES))
    ):
        return Verdict(INCONCLUSIVE, "not all of it was measured.")
    naive = ways[NAIVE]
    for row in (naive, *tiled):
        if row["asked_bytes"] != asked_bytes(row["rows"], row["side"], row["tile"]):
            return Verdict(INCONCLUSIVE, f"{row['way']}: the bytes in its row are not those that its loops ask for.")
    best = min(tiled, key=lambda row: float(row["device_ns"]))
    faster = times(naive, best).around(naive["device_ns"] / best["device_ns"])
    said = [
        f"a naive product of {naive['rows']} × {naive['side']} × {naive['side']} takes {units.duration(naive['device_ns'])}.",
        *_by_kind(naive, tiled, place),
        f"By their loops (counted, not measured) the naive one asks memory for {units.size(naive['asked_bytes'])} and tiles of "
        f"{best['tile']} for {units.size(best['asked_bytes'])}.",
    ]
    got, peak = naive["asked_bytes"] / naive["device_ns"] * 1e9, _bandwidth(place)
    if peak and got > peak:
        said.append(
            f"The naive one gets what it asks for at {units.rate(got, 'B/s')}, which the memory's {units.rate(peak, 'B/s')} "
            "cannot give: caches serve most of it."
        )
    # 'Several' is twice and more; what is between that and 'hardly' is left open.
    several = faster.within(least=SEVERAL)
    no_slower = [times(naive, row).around(naive["device_ns"] / row["device_ns"]).within(least=SLOWER) for row in tiled]
    if slow := [row["way"] for row, holds in zip(tiled, no_slower, strict=True) if holds is False]:
        said.append(f"Slower than the naive one: {', '.join(slow)}.")
    if None in (several, *no_slower):
        said.append(left_open((row["way"], row) for row in (naive, *tiled)))
    gains = several or (False if faster.within(least=HARDLY) is False else None)
    return Verdict(word(together(gains, *no_slower)), " ".join(said))


def _by_kind(naive: Mapping[str, Any], tiled: Rows, place: Place) -> Iterator[str]:
    """The best of the tiles with one result for each thread, and of those with several, which lie in registers."""
    if not place.on_gpu:
        yield _kind(naive, tiled, "")
        return
    plain = [row for row in tiled if TILES[row["tile"]][1] == 1]
    yield _kind(naive, plain, " in shared memory alone")
    yield _kind(
        naive, [row for row in tiled if row not in plain], ", with several results in the registers of each thread,"
    )
    if all(naive["device_ns"] < SEVERAL * row["device_ns"] for row in plain):
        yield "Shared memory alone, judged by itself, does not make it several times faster here: the registers do."


def _kind(naive: Mapping[str, Any], some: Rows, what: str) -> str:
    best = min(some, key=lambda row: float(row["device_ns"]))
    gain = naive["device_ns"] / best["device_ns"]
    return f"Tiles of {best['tile']}{what} take {units.duration(best['device_ns'])}: {gain:.3g} times as fast."


def draw(rows: Rows, place: Place) -> list[Picture]:
    known = _with_rates([row for row in rows if row["asked_bytes"]])
    peak = _bandwidth(place)
    # On a CPU the library's has vector instructions and all cores: in the table, but no bar beside loops on one.
    pictures = [
        Picture(
            title="Speed of a matmul, naive and in tiles", kind="bar", rows=rows if place.on_gpu else known, x="way",
            caption="The larger the tile, the fewer the reads."
            + (" Tiles of 64 and 128 have their results in registers." if place.on_gpu else ""),
            y="done_flops_per_s", x_title="", y_title="done",
        ),
        Picture(
            title="Time by what is asked of memory", kind="scatter", rows=known, x="asked_bytes", y="device_ns",
            caption="To the left the tiles grow. Time falls less than the bytes do: caches had served many of them.",
            colour="way", x_title="asked of memory (counted)", y_title="time", x_log=True, y_log=True,
        ),
    ]  # fmt: skip
    if peak:
        pictures.append(
            Picture(
                title="Rate at which what is asked arrives", kind="bar", rows=known, x="way", y="asked_bytes_per_s",
                caption="Above the memory's own bandwidth (the vendor's figure), caches serve the repeats.",
                x_title="", y_title="asked for, by time", rules=(Rule("y", peak, "memory"),),
            )
        )  # fmt: skip
    return pictures


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    columns = {
        "way": "how", "asked_bytes": "asked of memory (counted)", "device_ns": "time", "faster": "against naive",
        "done_flops_per_s": "done", "asked_bytes_per_s": "asked for, by time", "off": "largest error",
    }  # fmt: skip
    first: Mapping[str, Any] = rows[0]
    title = f"an fp32 product of {first['rows']} × {first['side']} × {first['side']}"
    return [TableOf(title, columns, [{**row, "off": f"{row['off']:.0e}"} for row in _with_rates(rows)])]


EXPERIMENT = Experiment(
    name="tiling",
    number=11,
    line="A naive matmul and tiled ones: the bytes they ask memory for, counted, and their times.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
