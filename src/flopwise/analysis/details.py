"""What rules need from a trace beyond where its time went: waits, chains of kernels, sizes of products, what overlapped."""

import re

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.idle import HostWait, host_waits, host_work_ns, loading_ranges
from flopwise.analysis.intervals import Times, clipped, covered_ns, gaps
from flopwise.analysis.product_sizes import Product, products
from flopwise.analysis.steps import Steps
from flopwise.analysis.traced_steps import TracedSteps
from flopwise.trace.phases import OPTIMIZER
from flopwise.trace.tables import Trace
from flopwise.work.operation import COMMUNICATION, COPY, ELEMENTWISE, NORMALISATION, REDUCTION

_MOVERS = (ELEMENTWISE, REDUCTION, COPY, NORMALISATION)  # not softmax: fused attention removes that as a whole
_FUSED = r"^triton_"  # a compiler's own kernel: what could be joined, it has joined
_REGION = re.compile(r"^Torch-Compiled Region: (\d+)/(\d+)")
_COMPILING = re.compile(
    r"(?i)^(?!.*cache lookup)(.*torchdynamo|.*dynamo_timed|.*_compile\.|compile_inner|.*inductor.*compil)"
)


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels that could have been one: neighbours on a stream that move memory for one module in one phase, per step."""

    module: str
    phase: str
    length: int  # kernels in a row
    count: float  # such rows
    gpu_ns: float
    kernels: tuple[str, ...] = ()  # names, of the first of its kind, at most four

    @property
    def removable_ns(self) -> float:
        """What they take beyond one of them: of n kernels that each read and write, n - 1 move what need not leave the chip."""
        return self.gpu_ns * (1 - 1 / self.length)


class CompiledRegions(msgspec.Struct, frozen=True, kw_only=True):
    """What torch.compile left in a trace, per step. A function without a graph break is one region; 0/1 is a recompilation."""

    frames: tuple[str, ...] = ()  # '0/0', '1/0', …: each once
    calls: float = 0.0
    compiling_ns: float = 0.0  # of the host, inside the steps

    @property
    def breaks(self) -> int:
        """Regions beyond the first: each but one begins where the compiler gave up."""
        return max(0, len({frame.partition("/")[0] for frame in self.frames}) - 1)

    @property
    def recompiled(self) -> int:
        return sum(frame.partition("/")[2] != "0" for frame in self.frames)


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """Of the steps of a trace; times are nanoseconds of one step."""

    steps: int
    waits: tuple[HostWait, ...] = ()
    chains: tuple[Chain, ...] = ()
    products: tuple[Product, ...] = ()  # of traces with shapes
    compiled: CompiledRegions = CompiledRegions()
    host_ns: float | None = None  # of the host's own work, slowed by the profiler; without its waiting for the GPU
    loading_ns: float = 0.0  # the host fetched a batch
    loading_idle_ns: float = 0.0  # and the GPU had nothing to do
    communication_ns: float = 0.0
    exposed_communication_ns: float = 0.0  # while no other work ran


def details(part: TracedSteps) -> Details:
    """The details of the steps of a trace."""
    trace, steps, work, n = part.trace, part.steps, part.work, len(part.steps)
    loading, loading_idle = _loading(trace, work, steps)
    communication, exposed = _communication(work)
    return Details(
        steps=n,
        waits=host_waits(trace, steps),
        chains=_chains(work, n),
        products=products(trace, work, n),
        compiled=_compiled_regions(trace, steps),
        host_ns=host_work_ns(trace, steps),
        loading_ns=loading / n,
        loading_idle_ns=loading_idle / n,
        communication_ns=communication / n,
        exposed_communication_ns=exposed / n,
    )


def _spans(table: pl.DataFrame) -> tuple[Times, Times]:
    start: Times = table["start_ns"].to_numpy()
    return start, start + table["duration_ns"].to_numpy()


def _loading(trace: Trace, work: pl.DataFrame, steps: Steps) -> tuple[int, int]:
    """Nanoseconds in ranges that fetch a batch, and those of them in which the GPU was idle."""
    loads = loading_ranges(trace)
    if not loads.height or not work.height:
        return 0, 0
    work_start, work_end = _spans(work)
    low, high = steps.starts_ns[0], max(steps.end_ns, int(work_end.max()))
    start, end = clipped(loads["start_ns"].to_numpy(), loads["end_ns"].to_numpy(), low, high)
    idle_start, idle_end = gaps(work_start, work_end, low, high)
    busy_or_loading = covered_ns(np.concatenate([work_start, start]), np.concatenate([work_end, end]))
    idle_while_loading = min(busy_or_loading - covered_ns(work_start, work_end), int((idle_end - idle_start).sum()))
    return covered_ns(start, end), idle_while_loading


def _communication(work: pl.DataFrame) -> tuple[int, int]:
    """Nanoseconds of communication, and those of them that no other work covers."""
    communicates = pl.col("class") == COMMUNICATION
    total, others = (covered_ns(*_spans(work.filter(kind))) for kind in (communicates, ~communicates))
    return total, covered_ns(*_spans(work)) - others


def _chains(work: pl.DataFrame, n: int) -> tuple[Chain, ...]:
    """Chains of two or more kernels, the longest time first; `work` is an Attribution's rows of the steps."""
    texts = pl.col("module", "phase", "name", "class").cast(pl.String).fill_null("")
    ordered = work.filter(pl.col("source") == "kernel").sort("stream", "start_ns", maintain_order=True)
    moves = pl.col("class").is_in(_MOVERS) & (pl.col("phase") != OPTIMIZER) & ~pl.col("name").str.contains(_FUSED)
    marked = ordered.select("stream", texts, "duration_ns").with_columns(moves=moves)
    runs = marked.with_columns(run=pl.struct("stream", "module", "phase", "moves").rle_id()).filter("moves")
    ns, kind = pl.col("duration_ns").sum(), ["module", "phase", "length"]
    each = runs.group_by("run", maintain_order=True).agg(
        pl.col("module", "phase").first(), ns, length=pl.len(), names=pl.col("name").head(4)
    )
    rows = (
        each.filter(pl.col("length") > 1).group_by(kind, maintain_order=True).agg(pl.len(), ns, pl.col("names").first())
    )
    return tuple(
        Chain(module=module, phase=phase, length=length, count=count / n, gpu_ns=ns / n, kernels=tuple(names))
        for module, phase, length, count, ns, names in rows.sort(
            "duration_ns", *kind, descending=[True, False, False, False]
        ).iter_rows()
    )


def _compiled_regions(trace: Trace, steps: Steps) -> CompiledRegions:
    """The regions called inside the steps, and the time that the host spent compiling there."""
    regions = {number: "/".join(m.groups()) for number, name in enumerate(trace.names) if (m := _REGION.match(name))}
    compiling = [number for number, name in enumerate(trace.names) if _COMPILING.search(name)]
    spans = pl.concat([table.select("start_ns", "end_ns", "name") for table in (trace.ops, trace.ranges)])
    inside = spans.filter(pl.Series(steps.of(spans["start_ns"].to_numpy()) >= 0))
    called = inside.filter(pl.col("name").is_in(list(regions)))
    busy = inside.filter(pl.col("name").is_in(compiling))
    start, end = (busy[name].to_numpy() for name in ("start_ns", "end_ns"))
    return CompiledRegions(
        frames=tuple(sorted({regions[number] for number in called["name"].to_list()})),
        calls=called.height / len(steps),
        compiling_ns=covered_ns(*clipped(start, end, steps.starts_ns[0], steps.end_ns)) / len(steps),
    )
