"""A stored run with the figures of its step."""

from typing import Self

import msgspec

from flopwise.analysis.clocks import point_mfu, tokens_per_second
from flopwise.errors import FlopwiseError
from flopwise.records.run import OK, Point
from flopwise.statistics import level
from flopwise.store import StoredRun


class MeasuredRun(StoredRun, frozen=True, kw_only=True):
    """What `bench`, `sweep`, `profile`, `run` and `watch` measured. `print` shows it as the command line does.

    The figures are of a run with one measured workload. A run of several raises: `each` has them one by one.
    """

    @property
    def median_ms(self) -> float:
        """The median wall time of the step; raises what stood in the way of measuring it."""
        times = self._measured().times()
        assert times is not None
        return level(times.by_process("wall")) / 1e6

    @property
    def mfu(self) -> float | None:
        """The useful FLOPs per second as a share of the GPU's dense peak for their dtype; None where either is not known."""
        return point_mfu(self._measured())

    @property
    def tokens_per_second(self) -> float | None:
        """None where the step shows no tokens."""
        return tokens_per_second(self._measured())

    @property
    def each(self) -> tuple[Self, ...]:
        """Its workloads, each as a run of one."""
        return tuple(msgspec.structs.replace(self, points=(point,)) for point in self.points)

    def _measured(self) -> Point:
        measured = [point for point in self.points if point.status == OK and (times := point.times()) and times.wall_ns]
        if len(measured) == 1:
            return measured[0]
        if measured:
            raise FlopwiseError(
                f"{self.header.id} has {len(measured)} workloads, and this is a figure of one",
                "take one of them: run.each[0].median_ms",
            )
        failed = next(iter(self.points), None)
        why = f"{failed.trial.workload.label()}: {failed.status}: {failed.reason}" if failed else "it has no points"
        raise FlopwiseError(f"nothing was measured: {why}", failed.hint if failed else "")
