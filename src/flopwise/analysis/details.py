"""What rules need from a trace beyond where its time went: waits, chains of kernels, sizes of products, what overlapped."""

import re

import msgspec
import polars as pl

from flopwise.analysis.collectives import collectives
from flopwise.analysis.host_activity import allocations, compiling, loading_ranges, span_times
from flopwise.analysis.host_waits import HostWait, host_waits, host_work_ns
from flopwise.analysis.idle import ALLOCATOR, COMPILATION, HOST, INPUT
from flopwise.analysis.intervals import Times, clipped, covered_ns
from flopwise.analysis.product_sizes import Product, products
from flopwise.analysis.steps import Steps
from flopwise.analysis.traced_steps import TracedSteps
from flopwise.trace.phases import OPTIMIZER
from flopwise.trace.tables import Trace
from flopwise.work.operation import COMMUNICATION, COPY, ELEMENTWISE, NORMALISATION, REDUCTION

_MOVERS = (ELEMENTWISE, REDUCTION, COPY, NORMALISATION)  # not softmax: fused attention removes that as a whole
_FUSED = r"^triton_"  # a compiler's own kernel: what could be joined, it has joined
_OTHER_CODE = 0.05  # of the window: less of the host's other code is what launching takes as well
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#(\w+)\.step$")
_REGION = re.compile(r"^Torch-Compiled Region: (\d+)/(\d+)")


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
    communication_ns: float = 0.0
    exposed_communication_ns: float = 0.0  # while no other work ran
    collectives: dict[str, float] = {}  # GPU time by kind: one of analysis.collectives
    ddp: bool = False  # DistributedDataParallel is at work
    optimizers: tuple[str, ...] = ()  # classes whose step the trace shows: 'AdamW'
    allocator_calls: dict[str, float] = {}  # of the driver's memory, by name


def details(part: TracedSteps) -> Details:
    """The details of the steps of a trace."""
    trace, steps, work, n = part.trace, part.steps, part.work, len(part.steps)
    communication, exposed = _communication(work)
    return Details(
        steps=n,
        waits=host_waits(trace, steps),
        chains=_chains(work, n),
        products=products(part.whole, work, n),
        compiled=_compiled_regions(trace, steps),
        host_ns=_launching_ns(part),
        loading_ns=_loading(trace, part.low_ns, part.high_ns) / n,
        communication_ns=communication / n,
        exposed_communication_ns=exposed / n,
        collectives=collectives(work, trace, n),
        ddp=any(name == "DistributedDataParallel.forward" for name in trace.names),
        optimizers=optimizer_classes(trace, steps),
        allocator_calls=_allocator_calls(trace, steps),
    )


def _launching_ns(part: TracedSteps) -> float | None:
    """The host's own work, less what it does besides launching while the GPU waits: a faster launch does not change that."""
    whole, causes = host_work_ns(part.trace, part.steps), part.idle.by_cause_ns
    if whole is None:
        return None
    other = causes[INPUT] + causes[COMPILATION] + causes[ALLOCATOR]
    if causes[HOST] >= _OTHER_CODE * (part.high_ns - part.low_ns):
        other += causes[HOST]
    return max(0.0, whole - other / len(part.steps))


def optimizer_classes(trace: Trace, steps: Steps) -> tuple[str, ...]:
    """The classes of the optimizers that took a step."""
    named = {number: match[1] for number, name in enumerate(trace.names) if (match := _OPTIMIZER_STEP.match(name))}
    spans = pl.concat([table.select("start_ns", "name") for table in (trace.ranges, trace.ops)])
    spans = spans.filter(pl.col("name").is_in(list(named)))
    inside = spans.filter(pl.Series(steps.of(spans["start_ns"].to_numpy()) >= 0))
    return tuple(sorted({named[number] for number in inside["name"].to_list()}))


def _allocator_calls(trace: Trace, steps: Steps) -> dict[str, float]:
    calls = allocations(trace)
    inside = calls.filter(pl.Series(steps.of(calls["start_ns"].to_numpy()) >= 0))
    rows = inside.group_by("name").len().sort("len", "name", descending=[True, False])
    return {trace.names[number]: count / len(steps) for number, count in rows.iter_rows()}


def _spans(table: pl.DataFrame) -> tuple[Times, Times]:
    start: Times = table["start_ns"].to_numpy()
    return start, start + table["duration_ns"].to_numpy()


def _loading(trace: Trace, low: int, high: int) -> int:
    """Nanoseconds in ranges that fetch a batch."""
    return covered_ns(*clipped(*span_times(loading_ranges(trace)), low, high))


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
    spans = pl.concat([table.select("start_ns", "end_ns", "name") for table in (trace.ops, trace.ranges)])
    inside = spans.filter(pl.Series(steps.of(spans["start_ns"].to_numpy()) >= 0))
    called = inside.filter(pl.col("name").is_in(list(regions)))
    start, end = span_times(compiling(trace))
    return CompiledRegions(
        frames=tuple(sorted({regions[number] for number in called["name"].to_list()})),
        calls=called.height / len(steps),
        compiling_ns=covered_ns(*clipped(start, end, steps.starts_ns[0], steps.end_ns)) / len(steps),
    )
