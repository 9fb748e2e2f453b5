"""What torch.compile left in a trace: the regions that a step runs, and compiling that still goes on."""

import re

import msgspec
import numpy as np
import polars as pl

from flopwise.analysis.intervals import Times, clipped, covered_ns
from flopwise.analysis.steps import Steps
from flopwise.trace.tables import Trace

_REGION = re.compile(r"^Torch-Compiled Region: (\d+)/(\d+)")
_COMPILING = re.compile(
    r"(?i)^(?!.*cache lookup)(.*torchdynamo|.*dynamo_timed|.*_compile\.|compile_inner|.*inductor.*compil)"
)


class CompiledRegions(msgspec.Struct, frozen=True, kw_only=True):
    """Per step. A function without a break is one region; 0/1 is the same code compiled a second time."""

    frames: tuple[str, ...] = ()  # '0/0', '1/0', …: each once
    calls: float = 0.0
    compiling_ns: float = 0.0  # of the host, inside the steps

    @property
    def breaks(self) -> int:
        """Regions beyond the first: each but one begins where the compiler gave up."""
        return max(0, len({frame.partition("/")[0] for frame in self.frames}) - 1)

    @property
    def recompiled(self) -> int:
        return sum(not frame.endswith("/0") for frame in self.frames)


def compiled_regions(trace: Trace, steps: Steps) -> CompiledRegions:
    """The regions called inside the steps, and the time that the host spent compiling there."""
    regions = {number: "/".join(m.groups()) for number, name in enumerate(trace.names) if (m := _REGION.match(name))}
    compiling = [number for number, name in enumerate(trace.names) if _COMPILING.search(name)]
    columns = ["start_ns", "end_ns", "name"]
    spans = pl.concat([trace.ops.select(columns), trace.ranges.select(columns)])
    inside = spans.filter(pl.Series(steps.of(spans["start_ns"].to_numpy()) >= 0))
    called = inside.filter(pl.col("name").is_in(list(regions)))
    busy = inside.filter(pl.col("name").is_in(compiling))
    start, end = _window(busy, steps)
    return CompiledRegions(
        frames=tuple(sorted({regions[number] for number in called["name"].to_list()})),
        calls=called.height / len(steps),
        compiling_ns=covered_ns(start, end) / len(steps),
    )


def _window(spans: pl.DataFrame, steps: Steps) -> tuple[Times, Times]:
    start, end = (spans[name].to_numpy().astype(np.int64) for name in ("start_ns", "end_ns"))
    return clipped(start, end, steps.starts_ns[0], steps.end_ns)
