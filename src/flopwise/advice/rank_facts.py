"""What the rules for several ranks know: the ranks explained together."""

from dataclasses import dataclass

from flopwise.records.ranks import BEGAN_LATE, GroupKind, RanksExplanation


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


def exposed_transfer_ns(one: GroupKind) -> float:
    """Of the collectives of a group: what they move while nothing is computed."""
    return min(one.transfer_ns, max(0.0, one.exposed_ns - one.waiting_ns))
