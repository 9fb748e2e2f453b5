"""What the rules for a step on the CPU know: its explanation, and where it ran."""

from dataclasses import dataclass

from flopwise.analysis.host_explanation import HostExplanation
from flopwise.records.run import Environment
from flopwise.work.operation import COPY, ELEMENTWISE, NORMALISATION, RANDOM, REDUCTION, SOFTMAX

MOVERS = (
    ELEMENTWISE,
    NORMALISATION,
    REDUCTION,
    SOFTMAX,
    COPY,
    RANDOM,
)  # they move memory; arithmetic costs them little


@dataclass(frozen=True)
class HostFacts:
    """A step without GPU work."""

    explanation: HostExplanation
    environment: Environment | None = None  # of a run of flopwise
    waterfall: None = None

    @property
    def step_ns(self) -> float:
        return self.explanation.step_ns

    def kinds_ns(self, kinds: tuple[str, ...], phases: tuple[str, ...] = ()) -> float:
        """Self time of ops of these classes, in these phases or in all; untraced where that is known."""
        cells = self.explanation.phase_kinds.items()
        spent = sum(row.get(kind, 0.0) for phase, row in cells if not phases or phase in phases for kind in kinds)
        return spent * self.explanation.op_time_left

    def outside_ns(self, *phases: str) -> float:
        """Time of these phases outside every op; where the untraced step is known, without what the profiler adds."""
        e = self.explanation
        kept = e.untraced_outside_ns / e.outside_ns if e.outside_ns else 0.0
        return kept * sum(one.outside_ns for one in e.phases if one.name in phases)
