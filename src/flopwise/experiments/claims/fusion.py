"""`fusion`: a chain of elementwise operations as one kernel instead of many: kernels launched, bytes moved, time.

sin² + cos² is five operations, GeLU written out is eight. Each eager operation reads its inputs from memory and writes its result
back; a fused kernel reads x once and writes y once. The bytes of the eager chain are counted as it runs, operation by operation;
the kernels are counted by the profiler on a GPU, and on the CPU they are the operations, or what the compiler says it generated.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flopwise import units
from flopwise.experiments.experiment import INCONCLUSIVE, Experiment, Picture, Row, Rows, TableOf, Verdict
from flopwise.experiments.steadiness import device_clock, left_open, of_memory, times, together, word
from flopwise.records.experiment import Place
from flopwise.spec.gpu import find_gpu

if TYPE_CHECKING:
    import torch

    from flopwise.experiments.bench import Bench

    Ways = dict[str, Callable[[torch.Tensor], torch.Tensor]]

CLAIM = (
    "Fused into one kernel, a chain of elementwise operations is faster about as many times as it moves fewer bytes: the time is "
    "that of the memory, not of the arithmetic."
)
SINES, GELU = "sin² + cos²", "GeLU"
UNFUSED, TORCH, COMPILED, TRITON, CUDA = "unfused", "torch's own", "torch.compile", "ours, Triton", "ours, CUDA C++"
ON_GPU = {SINES: (COMPILED, TRITON), GELU: (TORCH, COMPILED, TRITON, CUDA)}  # the fused forms that there are
ABOUT = (0.5, 2.0)  # of the times that the bytes predict: elsewhere is not 'about as many'
WRONG = 1e-5  # off by more: another result; of results up to 5, rounding leaves 5e-7
SECONDS = 0.15  # of samples for each


def measure(bench: "Bench") -> Iterator[Row]:
    import torch

    # On a GPU 256 MiB, 128 MiB if quick: more than its L2 cache holds. On a CPU 64 MiB, 4 MiB if quick.
    n = 2 ** ((26 - bench.quick) if bench.on_gpu else (24 - 4 * bench.quick))
    x = torch.randn(n, device=bench.device)
    for number, (chain, ways) in enumerate(_chains(bench).items()):
        right = ways[UNFUSED](x)
        moved = _moved_bytes(ways[UNFUSED], x)
        for place, (way, function) in enumerate(ways.items()):
            bench.doing(f"{chain}, {way}")

            def run(function: "Callable[[torch.Tensor], torch.Tensor]" = function) -> "torch.Tensor":
                return function(x)

            yield {
                "chain": chain, "way": way, "n": n, "off": float((run() - right).abs().max()),
                "kernels": _kernels(bench, run, way, f"{number}-{place}"),
                "moved_bytes": moved if way == UNFUSED else 2 * x.nbytes,
                "peak_bytes": bench.peak_bytes(run), **bench.time(run, seconds=SECONDS if not bench.quick else None).row(),
            }  # fmt: skip


def sines(x: "torch.Tensor") -> "torch.Tensor":
    """sin² x + cos² x, as the lecture writes it."""
    import torch

    return torch.sin(x) ** 2 + torch.cos(x) ** 2


def _chains(bench: "Bench") -> "dict[str, Ways]":
    import torch

    from flopwise.lm.layers import gelu_eager, gelu_torch

    first: Ways = {UNFUSED: sines}
    second: Ways = {UNFUSED: gelu_eager, TORCH: gelu_torch}
    if bench.on_gpu or not bench.quick:  # on a CPU, the C++ compiler alone takes seconds
        first[COMPILED], second[COMPILED] = torch.compile(sines), torch.compile(gelu_eager)
    if bench.on_gpu:
        from flopwise.kernels.gelu import gelu_cuda, gelu_triton
        from flopwise.kernels.pointwise_chains import sin_cos

        first[TRITON], second[TRITON], second[CUDA] = sin_cos, gelu_triton, gelu_cuda
    return {SINES: first, GELU: second}


def _moved_bytes(function: "Callable[[torch.Tensor], torch.Tensor]", x: "torch.Tensor") -> int:
    """Every operation's inputs and results, as it runs."""
    return sum(sum(sizes) for sizes in _operations(function, x))


def _operations(function: "Callable[[torch.Tensor], torch.Tensor]", x: "torch.Tensor") -> list[list[int]]:
    """Of each operation that runs, the bytes of the tensors that it reads and writes."""
    import torch

    from flopwise.torch_private import TorchDispatchMode

    found: list[list[int]] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            # A number beside a tensor may come as a tensor without dimensions: it is no traffic.
            found.append([t.nbytes for t in (*args, result) if isinstance(t, torch.Tensor) and t.dim()])
            return result

    with Counting():  # type: ignore[no-untyped-call]
        function(x)
    return found


def _kernels(bench: "Bench", run: "Callable[[], torch.Tensor]", way: str, name: str) -> int | None:
    """How many kernels one call launches, by the profiler; on the CPU operations, and of compiled code what was generated."""
    import torch

    from flopwise.capture.kineto import trace_steps
    from flopwise.capture.step import Step
    from flopwise.records.events import TraceRequest
    from flopwise.records.run import STEP, Ran

    if not bench.on_gpu:
        if way == COMPILED:
            return 1 if _generated_one() else None
        return len(_operations(lambda _: run(), torch.empty(0)))
    trace = bench.file(f"fusion-{name}.json")
    step = Step(phases={STEP: run}, ran=lambda: Ran(device=str(bench.device)))
    trace_steps(step, bench.device, TraceRequest(path=str(trace), steps=1))
    events = json.loads(trace.read_bytes())["traceEvents"]
    return len([event for event in events if event.get("cat") == "kernel"]) or None


def _generated_one() -> bool:
    """Whether the compiler made one kernel for each chain that it compiled until now."""
    from flopwise.torch_private import compiled_graphs, generated_kernels

    return generated_kernels() == compiled_graphs()


def _one(rows: Rows, chain: str, way: str) -> Mapping[str, Any] | None:
    return next((row for row in rows if (row["chain"], row["way"]) == (chain, way)), None)


def _device_ns(row: Mapping[str, Any]) -> float:
    return float(row[device_clock(row)])


def beside_unfused(rows: Rows) -> list[Row]:
    """Each row with how many times faster it is than the unfused chain, what its bytes predict, and its bandwidth."""
    told: list[Row] = []
    for row in rows:
        plain = _one(rows, row["chain"], UNFUSED)
        took = _device_ns(row)
        told.append(
            {
                **row, "took_ns": took, "rate_bytes_per_s": row["moved_bytes"] / took * 1e9,
                "times_faster": _device_ns(plain) / took if plain else None,
                "times_fewer": plain["moved_bytes"] / row["moved_bytes"] if plain else None,
            }
        )  # fmt: skip
    return told


def judge(rows: Rows, place: Place) -> Verdict:
    """Every fused form must gain what its bytes promise: one that does not is a fused kernel that memory does not limit."""
    if wrong := [_name(row) for row in rows if row["off"] > WRONG]:
        return Verdict(INCONCLUSIVE, f"wrong results: {', '.join(wrong)}.")
    told = beside_unfused(rows)
    several = [
        f"{_name(row)} ({row['kernels'] or '?'} kernels)"
        for row in told
        if row["way"] != UNFUSED and row["kernels"] != 1
    ]
    fused = [row for row in told if row["way"] != UNFUSED and row["kernels"] == 1 and row["times_faster"]]
    missing = [chain for chain in ON_GPU if not any(row["chain"] == chain for row in fused)]
    if place.on_gpu:
        measured = {(row["chain"], row["way"]) for row in told}
        missing += [f"{chain}, {way}" for chain, ways in ON_GPU.items() for way in ways if (chain, way) not in measured]
    plain = {row["chain"]: row for row in rows if row["way"] == UNFUSED}
    gains = [
        times(plain[row["chain"]], row).within(ABOUT[0] * row["times_fewer"], ABOUT[1] * row["times_fewer"])
        for row in fused
    ]
    chip = find_gpu(place.name) if place.on_gpu else None
    peak = chip.bandwidth_bytes_s if chip else None
    of_memorys = [of_memory(row, peak) for row in (*plain.values(), *fused)]
    said = [
        _told(plain[chain], [row for row in fused if row["chain"] == chain]) for chain in ON_GPU if chain not in missing
    ]
    off = [_name(row) for row, gain in zip(fused, gains, strict=True) if gain is False]
    said += [f"not about as many times as the bytes say: {', '.join(off)}"] if off else []
    if False in of_memorys:
        said.append("at less than half of the memory's specified bandwidth it is not the memory that takes the time")
    if None in of_memorys:
        said.append("some of it is faster than the specified memory, or not known exactly enough")
    said += [f"not one kernel: {', '.join(several)}"] if several else []
    said += [f"no fused form was measured of: {', '.join(missing)}"] if missing else []
    if missing and not place.on_gpu:
        said.append("on a CPU, quick mode leaves the compiler out")
    answer = together(*gains, *of_memorys, *([None] if missing or several else []))
    why = "; ".join(said) + "."
    if answer is None and None in gains:
        why += " " + left_open((_name(row), row) for row in (*plain.values(), *fused))
    return Verdict(word(answer), why)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['chain']}, {row['way']}"


def _told(plain: Mapping[str, Any], fused: Rows) -> str:
    """One chain: unfused, fused in every way, and the best of them."""
    best = max(fused, key=lambda row: float(row["times_faster"]))
    ways = ", ".join(f"{row['way']} {units.duration(row['took_ns'])}" for row in fused)
    return (
        f"{plain['chain']}: {plain['kernels']} operations move {units.size(plain['moved_bytes'])} in "
        f"{units.duration(_device_ns(plain))}, fused {units.size(best['moved_bytes'])} ({ways}): at best "
        f"{best['times_faster']:.1f} times as fast with {best['times_fewer']:.1f} times fewer bytes"
    )


def draw(rows: Rows, place: Place) -> list[Picture]:
    told = beside_unfused(rows)
    faster = [
        {**row, "times": row[key], "what": word, "label": f"{row['chain']}, {row['way']}"}
        for row in told
        if row["way"] != UNFUSED and row["times_faster"]
        for word, key in (("fewer bytes: predicted", "times_fewer"), ("faster: measured", "times_faster"))
    ]
    pictures = [
        Picture(
            title="Time of a chain of elementwise operations", kind="bar", rows=told, x="chain", y="took_ns",
            colour="way", x_title="", y_title="time", caption="The same numbers, computed by many kernels or by one.",
        ),
        Picture(
            title="Times faster than unfused, beside what the bytes predict", kind="scatter", rows=faster, x="times", y="label",
            colour="what", x_title="times", y_title="",
            caption="Where the two points meet, memory is all that counts. Where measured lies left, something else takes time.",
        ),
    ]  # fmt: skip
    return [picture for picture in pictures if picture.rows]


def tabulate(rows: Rows, place: Place) -> list[TableOf]:
    columns = {
        "chain": "chain",
        "way": "way",
        "kernels": "kernels" if place.on_gpu else "operations",
        "moved_bytes": "moved",
    }
    columns |= {"wall_ns": "wall"} | ({"gpu_ns": "GPU", "peak_bytes": "memory taken"} if place.on_gpu else {})
    columns |= {"rate_bytes_per_s": "bandwidth", "times_faster": "times faster", "times_fewer": "times fewer bytes"}
    columns |= {"off": "off by"}
    notes = ("moved: counted from the tensors that each operation reads and writes",)
    return [TableOf(f"{units.count(rows[0]['n'])} numbers in fp32", columns, beside_unfused(rows), notes)]


EXPERIMENT = Experiment(
    name="fusion",
    number=8,
    line="sin² + cos² and GeLU unfused, compiled and as kernels of our own: kernels launched, bytes moved, time.",
    claim=CLAIM,
    measure=measure,
    judge=judge,
    draw=draw,
    tabulate=tabulate,
)
