"""What rules ask of a trace beyond where its time went: waits, chains of kernels, sizes of products, what overlapped."""

import re

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.chains import Chain, chains
from flopwise.analysis.compiled_regions import CompiledRegions, compiled_regions
from flopwise.analysis.host_waits import HostWait, host_waits
from flopwise.analysis.intervals import Times, clipped, covered_ns, gaps
from flopwise.analysis.product_sizes import Product, products
from flopwise.analysis.steps import Steps, find_steps, launch_times
from flopwise.trace.attribute import attribute
from flopwise.trace.tables import NO_ID, Trace, of_process
from flopwise.work.operation import COMMUNICATION

_LOADING = re.compile(
    r"(?i)dataloader.*__next__|^(dataloader|data[ _]?load(ing)?|get_?batch|next_?batch|fetch(_batch)?)$"
)


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """Of the steps of a trace; times are nanoseconds of one step."""

    steps: int
    waits: tuple[HostWait, ...] = ()
    chains: tuple[Chain, ...] = ()
    products: tuple[Product, ...] = ()  # of traces with shapes
    compiled: CompiledRegions = CompiledRegions()
    loading_ns: float = 0.0  # the host fetched a batch
    loading_idle_ns: float = 0.0  # and the GPU had nothing to do
    communication_ns: float = 0.0
    exposed_communication_ns: float = 0.0  # with no other work beside it


def details(trace: Trace) -> Details:
    """Of the steps on the device and in the process that worked most."""
    table = attribute(trace).table
    spent = table.group_by("device", "process").agg(pl.col("duration_ns").sum()).sort("duration_ns", descending=True)
    if not spent.height:
        return Details(steps=1)
    device, process = spent["device"][0], spent["process"][0]
    everywhere = table.filter(pl.col("device") == device, pl.col("process").is_in([process, NO_ID]))
    mine = of_process(trace, process)
    steps = find_steps(mine, everywhere)
    return details_of(mine, steps, everywhere.filter(pl.Series(steps.of(launch_times(everywhere)) >= 0)))


def details_of(trace: Trace, steps: Steps, work: pl.DataFrame) -> Details:
    """Of steps that were found already: `trace` is of their process, `work` an Attribution's rows of the steps."""
    n = len(steps)
    loading, loading_idle = _loading(trace, work, steps)
    talking, exposed = _communication(work)
    return Details(
        steps=n,
        waits=host_waits(trace, steps),
        chains=chains(work, n),
        products=products(trace, work, n),
        compiled=compiled_regions(trace, steps),
        loading_ns=loading / n,
        loading_idle_ns=loading_idle / n,
        communication_ns=talking / n,
        exposed_communication_ns=exposed / n,
    )


def _spans(table: pl.DataFrame) -> tuple[Times, Times]:
    start: Times = table["start_ns"].to_numpy()
    return start, start + table["duration_ns"].to_numpy()


def _loading(trace: Trace, work: pl.DataFrame, steps: Steps) -> tuple[int, int]:
    """Nanoseconds in ranges that fetch a batch, and of these the GPU's idle ones."""
    named = [number for number, name in enumerate(trace.names) if _LOADING.search(name)]
    columns = ["start_ns", "end_ns"]
    loads = pl.concat([t.filter(pl.col("name").is_in(named)).select(columns) for t in (trace.ranges, trace.ops)])
    if not loads.height or not work.height:
        return 0, 0
    low, high = steps.starts_ns[0], max(steps.end_ns, int(_spans(work)[1].max()))
    start, end = clipped(loads["start_ns"].to_numpy(), loads["end_ns"].to_numpy(), low, high)
    idle_start, idle_end = gaps(*_spans(work), low, high)
    busy_or_loading = covered_ns(np.concatenate([_spans(work)[0], start]), np.concatenate([_spans(work)[1], end]))
    busy = covered_ns(*_spans(work))
    idle_while_loading = min(busy_or_loading - busy, int((idle_end - idle_start).sum()))
    return covered_ns(start, end), idle_while_loading


def _communication(work: pl.DataFrame) -> tuple[int, int]:
    """Nanoseconds of communication, and of these the ones that no other work covers."""
    talks = work.filter(pl.col("class") == COMMUNICATION)
    others = work.filter(pl.col("class") != COMMUNICATION)
    return covered_ns(*_spans(talks)), covered_ns(*_spans(work)) - covered_ns(*_spans(others))
