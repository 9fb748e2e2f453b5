"""`fusion`: a chain of elementwise operations as one kernel instead of many: kernels launched, bytes moved, time.

sin² + cos² is five operations, GeLU written out is eight. Each eager operation reads its inputs from memory and writes its result
back; a fused kernel reads x once and writes y once. The bytes of the eager chain are counted as it runs, operation by operation;
the kernels are counted by the profiler on a GPU, and on the CPU they are the operations, or what the compiler says it generated.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import Axis, Experiment, Picture, bar, columns, scatter, table_of
from flopwise.experiments.rows import Moved, by, fields
from flopwise.experiments.verdict import Check, each, least_certain, memory_bound, require, said, within
from flopwise.records.experiment import Place
from flopwise.records.run import STEP
from flopwise.records.table import Table

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

    Function = Callable[[torch.Tensor], torch.Tensor]

LINE = "sin² + cos² and GeLU unfused, compiled and as kernels of our own: kernels launched, bytes moved, time."
CLAIM = (
    "Fused into one kernel, a chain of elementwise operations is faster about as many times as it moves fewer bytes: the time is "
    "that of the memory, not of the arithmetic."
)
SINES, GELU = "sin² + cos²", "GeLU"
UNFUSED, TORCH, COMPILED, TRITON, CUDA = "unfused", "torch's own", "torch.compile", "ours, Triton", "ours, CUDA C++"
ON_GPU = {SINES: (COMPILED, TRITON), GELU: (TORCH, COMPILED, TRITON, CUDA)}  # the fused forms that exist
ABOUT = (0.5, 2.0)  # of the times that the bytes predict: elsewhere is not 'about as many'
WRONG = 1e-5  # an error above is another result; of results up to 5, rounding leaves 5e-7
SECONDS = 0.15  # of samples for each


class Chain(Moved, frozen=True):
    chain: str
    way: str
    n: int
    off: float  # largest difference from the unfused result
    kernels: int | None
    peak_bytes: int | None

    @property
    def name(self) -> str:
        return f"{self.chain}, {self.way}"


Rows = Sequence[Chain]


def measure(bench: "Bench") -> Iterator[Chain]:
    # On a GPU 256 MiB, 128 MiB if quick: more than its L2 cache holds. On a CPU 64 MiB, 4 MiB if quick.
    n = 2 ** ((26 - bench.quick) if bench.on_gpu else (24 - 4 * bench.quick))
    x = bench.randn(n)
    for number, (chain, ways) in enumerate(_chains(bench).items()):
        right, moved = ways[UNFUSED](x), sum(sum(sizes) for _, sizes in operations(ways[UNFUSED], x))
        for place, (way, function) in enumerate(ways.items()):
            bench.doing(f"{chain}, {way}")
            run = partial(function, x)
            off, peak = float((run() - right).abs().max()), bench.peak_bytes(run)
            kernels = _kernels(bench, run, way, f"{number}-{place}")
            timing = bench.time(run, seconds=None if bench.quick else SECONDS)
            moves = moved if way == UNFUSED else 2 * x.nbytes
            yield Chain(chain, way, n, off, kernels, peak, moved_bytes=moves, **fields(timing))


def sines(x: "torch.Tensor") -> "torch.Tensor":
    """sin² x + cos² x, as the lecture writes it."""
    import torch

    return torch.sin(x) ** 2 + torch.cos(x) ** 2


def _chains(bench: "Bench") -> "dict[str, dict[str, Function]]":
    import torch

    from flopwise.lm.layers import gelu_eager, gelu_torch

    first: dict[str, Function] = {UNFUSED: sines}
    second: dict[str, Function] = {UNFUSED: gelu_eager, TORCH: gelu_torch}
    if bench.on_gpu or not bench.quick:  # on a CPU, the C++ compiler alone takes seconds
        first[COMPILED], second[COMPILED] = torch.compile(sines), torch.compile(gelu_eager)
    if bench.on_gpu:
        from flopwise.kernels.gelu import gelu_cuda, gelu_triton
        from flopwise.kernels.pointwise_chains import sin_cos

        first[TRITON], second[TRITON], second[CUDA] = sin_cos, gelu_triton, gelu_cuda
    return {SINES: first, GELU: second}


def operations(function: "Function", x: "torch.Tensor") -> list[tuple[str, list[int]]]:
    """Each operation that runs, and the bytes of the tensors that it reads and writes."""
    import torch

    from flopwise.torch_private import TorchDispatchMode, overload_packet

    found: list[tuple[str, list[int]]] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            # A plain number may come as a tensor without dimensions: it is no traffic.
            sizes = [t.nbytes for t in (*args, result) if isinstance(t, torch.Tensor) and t.dim()]
            found.append((overload_packet(func).__name__, sizes))
            return result

    with Counting():  # type: ignore[no-untyped-call]
        function(x)
    return found


def _kernels(bench: "Bench", run: "Callable[[], torch.Tensor]", way: str, name: str) -> int | None:
    """How many kernels one call launches, by the profiler; on the CPU operations, and of compiled code what was generated."""
    import torch

    if not bench.on_gpu and way == COMPILED:
        from flopwise.torch_private import compiled_graphs, generated_kernels

        # whether the compiler made one kernel for each chain until now
        return 1 if generated_kernels() == compiled_graphs() else None
    if not bench.on_gpu:
        return len(operations(lambda _: run(), torch.empty(0)))
    events = json.loads(bench.trace({STEP: run}, f"fusion-{name}.json").read_bytes())["traceEvents"]
    return len([event for event in events if event.get("cat") == "kernel"]) or None


def with_gains(rows: Rows) -> list[dict[str, Any]]:
    """Each row with its bandwidth, how many times faster it is than the unfused chain, and what its bytes predict."""
    unfused = {row.chain: row for row in rows if row.way == UNFUSED}
    found = []
    for row in rows:
        rate = {"took_ns": row.took_ns, "rate_bytes_per_s": row.moved_bytes / row.took_ns * 1e9}
        plain = unfused.get(row.chain)
        faster = plain.took_ns / row.took_ns if plain else None
        fewer = plain.moved_bytes / row.moved_bytes if plain else None
        found.append(fields(row) | rate | {"times_faster": faster, "times_fewer": fewer})
    return found


def judge(rows: Rows, place: Place) -> Iterator[Check]:
    """Every fused form must gain what its bytes promise: one that does not is a fused kernel that memory does not limit."""
    wrong = ", ".join(row.name for row in rows if row.off > WRONG)
    yield require("right results", not wrong, f"wrong results: {wrong}.")
    unfused = by((row for row in rows if row.way == UNFUSED), "chain")
    fused = [row for row in rows if row.way != UNFUSED and row.kernels == 1 and row.chain in unfused]
    for chain in by(fused, "chain"):
        yield said(_described(unfused[chain], [row for row in fused if row.chain == chain]))
    yield _gain(unfused, fused)
    judged = by((*unfused.values(), *fused), "name")
    yield memory_bound(judged, place.bandwidth)
    yield _one_kernel([row for row in rows if row.way != UNFUSED])
    cpu = "" if place.on_gpu else " On a CPU, quick mode leaves the compiler out."
    yield each("all forms", _missing(rows, fused, place), unknown=f"No fused form was measured of: {{}}.{cpu}")
    yield least_certain(judged)


def _gain(unfused: Mapping[str, Chain], fused: Rows) -> Check:
    """How many times as fast as the unfused chain, over how many times fewer bytes."""
    ratios = {}
    for row in fused:
        plain = unfused[row.chain]
        faster = plain.device / row.device
        ratios[row.name] = faster.around(faster.middle * row.moved_bytes / plain.moved_bytes)
    return within("gain of fewer bytes", ratios, *ABOUT, refuted="Not about as many times as the bytes say: {}.")


def _one_kernel(rows: Rows) -> Check:
    several = {f"{row.name} ({row.kernels or '?'} kernels)": None for row in rows if row.kernels != 1}
    return each("one kernel", several, unknown="Not one kernel: {}.")


def _missing(rows: Rows, fused: Rows, place: Place) -> dict[str, None]:
    """The chains without any fused form; on a GPU also every form that was not measured."""
    chains = [chain for chain in ON_GPU if chain not in by(fused, "chain")]
    forms = [f"{chain}, {way}" for chain, ways in ON_GPU.items() for way in ways if place.on_gpu]
    return dict.fromkeys([*chains, *(form for form in forms if form not in by(rows, "name"))])


def _described(plain: Chain, fused: Sequence[Chain]) -> str:
    """One chain: unfused, fused in every way, and the best of them."""
    best = min(fused, key=lambda row: row.took_ns)
    ways = ", ".join(f"{row.way} {units.duration(row.took_ns)}" for row in fused)
    return (
        f"{plain.chain}: {plain.kernels} operations move {units.size(plain.moved_bytes)} in "
        f"{units.duration(plain.took_ns)}, fused {units.size(best.moved_bytes)} ({ways}): at best "
        f"{plain.took_ns / best.took_ns:.1f} times as fast with {plain.moved_bytes / best.moved_bytes:.1f} times fewer bytes."
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    chains = with_gains(rows)
    faster = [
        {"times": row[key], "what": what, "label": f"{row['chain']}, {row['way']}"}
        for row in chains
        if row["way"] != UNFUSED and row["times_faster"]
        for what, key in (("fewer bytes: predicted", "times_fewer"), ("faster: measured", "times_faster"))
    ]
    return [
        bar(chains, Axis("chain"), Axis("took_ns", "time"), colour="way").titled(
            "Time of a chain of elementwise operations", "The same numbers, computed by many kernels or by one."
        ),
        scatter(faster, Axis("times", "times"), Axis("label"), colour="what").titled(
            "Times faster than unfused, and what the bytes predict",
            "Where the two points meet, memory is all that counts. Where measured lies left, something else takes time.",
        ),
    ]


def tabulate(rows: Rows, place: Place) -> list[Table]:
    headings = columns("chain", "way", kernels="kernels" if place.on_gpu else "operations", moved_bytes="moved")
    headings |= columns(wall_ns="wall") | (columns(gpu_ns="GPU", peak_bytes="memory taken") if place.on_gpu else {})
    headings |= columns(rate_bytes_per_s="bandwidth", times_faster="times faster", times_fewer="times fewer bytes")
    notes = ("moved: counted from the tensors that each operation reads and writes",)
    title = f"{units.count(rows[0].n)} numbers in fp32"
    return [table_of(title, headings | columns(off="error"), with_gains(rows), notes)]


EXPERIMENT = Experiment(8, "fusion", LINE, CLAIM, (Chain,), measure, judge, draw, tabulate)
