"""What a profiler costs the host, in a unit that the trace itself shows.

Every op, range and call that is recorded costs the host time, most of it between the stamps of an event and of the one
around it. How much depends on the machine and on what is recorded (shapes, memory): the time from an op's own start to the
start of the first op inside it has both in it. Its median is the unit; the costs are multiples of it.

Fitted, with their error, by `python benchmarks/untraced_steps.py` (benchmarks/results/untraced-2026-11.md).
"""

import msgspec
import numpy as np
import polars as pl

from flopwise.trace.tables import Trace

_FEWEST = 30  # ops inside others, for a median
# Of a launch's median duration: what the unit is in traces of eight machines and two profilers, 0.20 to 0.34.
_UNIT_OF_LAUNCH = 0.27


class ProfilerCost(msgspec.Struct, frozen=True, kw_only=True):
    """Units that the host spends on recording."""

    event: float  # an op, a range, a call
    python_call: float = 0.0  # a Python function, where stacks are recorded


class CostRange(msgspec.Struct, frozen=True, kw_only=True):
    """Of the measured pairs: the least cost, the median and the most."""

    least: ProfilerCost
    likely: ProfilerCost
    most: ProfilerCost


COSTS = {
    "kineto": CostRange(
        least=ProfilerCost(event=0.6, python_call=0.0),
        likely=ProfilerCost(event=2.4, python_call=0.5),
        most=ProfilerCost(event=4.7, python_call=4.0),  # compiled steps: few events, and their stacks cost the most
    ),
    "nsys": CostRange(least=ProfilerCost(event=1.4), likely=ProfilerCost(event=2.5), most=ProfilerCost(event=4.2)),
}
NO_COST = ProfilerCost(event=0.0)


def unit_ns(trace: Trace) -> float:
    """The unit of one trace; 0 where neither its ops nor its launches show one."""
    thread, start, end = (trace.ops[name].to_numpy() for name in ("thread", "start_ns", "end_ns"))
    order = np.argsort(thread, kind="stable")  # within a thread by start, the enclosing one first
    thread, start, end = thread[order], start[order], end[order]
    inside = (thread[1:] == thread[:-1]) & (start[1:] < end[:-1])
    if int(inside.sum()) >= _FEWEST:
        return float(np.median((start[1:] - start[:-1])[inside]))
    launches = trace.launches.select(pl.col("end_ns") - pl.col("start_ns")).to_series()
    return _UNIT_OF_LAUNCH * float(np.median(launches.to_numpy())) if len(launches) else 0.0
