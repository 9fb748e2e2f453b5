"""What the rules for several ranks know: the ranks explained together."""

from dataclasses import dataclass

from flopwise.analysis.collectives import ALL_REDUCE, REDUCE_SCATTER
from flopwise.records.ranks import BEGAN_LATE, GroupKind, RanksExplanation
from flopwise.trace.phases import BACKWARD, OPTIMIZER, OTHER


@dataclass(frozen=True)
class RankFacts:
    """The step of a job."""

    explanation: RanksExplanation
    waterfall: None = None

    @property
    def step_ns(self) -> float:
        return self.explanation.step_ns

    @property
    def waiting_ns(self) -> float:
        """Mean over the ranks, without what they wait because their first traced steps began at different times."""
        e = self.explanation
        began = sum(one.waiting_ns for one in e.collectives if one.cause == BEGAN_LATE) / max(1, len(e.steps))
        return max(0.0, e.mean_ns("waiting") - began)

    def exposed_ns(self, one: GroupKind) -> float:
        """What a group's collectives move while nothing is computed, mean over all ranks of the job."""
        alone = min(one.transfer_ns, max(0.0, one.exposed_ns - one.waiting_ns))
        return alone * one.present / max(1, len(self.explanation.ranks))

    def gradients(self) -> list[GroupKind]:
        """Collectives that reduce gradients: of the backward pass or the optimizer; where phases are not known, of all ranks."""
        e = self.explanation
        known = [one for one in e.groups if one.kind in (ALL_REDUCE, REDUCE_SCATTER)]
        whole = (OTHER, max(e.world, len(e.ranks)))
        return [one for one in known if one.phase in (BACKWARD, OPTIMIZER) or (one.phase, one.ranks) == whole]
