"""A step without its profiler."""

import msgspec


class UntracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step without a profiler: by the clock where it was measured, else estimated from the trace."""

    ns: float
    low_ns: float  # the optimistic end: the profiler cost as much as in any step that was measured with and without it
    high_ns: float  # the profiler cost as little
    measured: bool = False
    host_left: float = 1.0  # of the traced host's own time, without the profiler's cost
