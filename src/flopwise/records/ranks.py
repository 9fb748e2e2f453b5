"""Several ranks of one job, explained together. Times are nanoseconds of one step unless named otherwise."""

import msgspec

from flopwise.records.finding import Finding
from flopwise.records.printed import Printed

# Why a rank comes last.
MORE_COMPUTE, SLOWER_CLOCK, HOST_LATE = "more compute", "slower clock", "host late"
INPUT, LINK, BEGAN_LATE = "input", "link", "began late"
CAUSES = (MORE_COMPUTE, SLOWER_CLOCK, HOST_LATE, INPUT, LINK, BEGAN_LATE)


class GroupTime(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's communication in one process group and phase."""

    group: str
    phase: str
    exposed_ns: float  # while the rank computed nothing
    hidden_ns: float


class RankTime(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's step went: compute, transfer, waiting, input and idle add up to `step_ns`."""

    rank: int
    path: str
    host: str
    gpu: str
    step_ns: float
    compute_ns: float
    transfer_ns: float  # communication that nothing hides, once the last rank had arrived
    waiting_ns: float  # the same, until then
    input_ns: float  # idle or copying while data is loaded
    idle_ns: float
    hidden_ns: float  # communication while it computed: part of `compute_ns`
    clock_ahead_ns: float  # of the first rank's clock
    last: int  # collectives of all steps to which it came last
    collectives: int  # that it took part in
    communication: tuple[GroupTime, ...] = ()


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """One collective: from when its last rank arrived it moves data, before that the others wait."""

    group: str
    kind: str
    step: str
    ranks: int  # whose traces are here
    size: int  # ranks of the group
    bytes: int | None
    waiting_ns: float  # mean over the ranks
    longest_waiting_ns: float
    transfer_ns: float
    last_rank: int
    cause: str = ""  # of its coming last, where that is known
    algorithm_bytes_s: float | None = None  # as NCCL's tests define them
    bus_bytes_s: float | None = None


class GroupKind(msgspec.Struct, frozen=True, kw_only=True):
    """All collectives of one kind in one process group, of one step."""

    group: str
    kind: str
    phase: str  # of most of them
    ranks: int
    present: int  # of them with a trace
    count: float
    bytes: float | None
    waiting_ns: float  # mean over its ranks, hidden or not
    transfer_ns: float
    exposed_ns: float
    hidden_ns: float
    bus_bytes_s: float | None = None
    link_bytes_s: float | None = None  # the limit
    across_hosts: bool | None = None  # None: not known


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, or the ranks of a group, that the others wait for."""

    rank: int  # -1: a whole group
    group: str = ""  # whose link it is
    cause: str
    because: str  # in words, with numbers
    late_ns: float  # how much longer than the median rank it takes for its own work; of a link, for its transfers
    began_late_ns: float = 0.0  # of that, before the first traced step began
    last: int  # collectives of all steps to which it comes last; of a link, that go over it
    collectives: int  # that it takes part in
    saving_ns: float  # if it were as fast as the median rank


class RankSpan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank did, from when to when since the drawn step began."""

    rank: int
    state: str
    start_ns: int
    end_ns: int


class RanksTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One step of some ranks."""

    step: str
    duration_ns: int
    ranks: tuple[int, ...]
    spans: tuple[RankSpan, ...]
    left_out: int  # ranks that are not drawn


class PlannedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the step: planned, and of the mean rank measured."""

    part: str  # as of RankTime: 'compute', 'transfer', 'waiting', 'input', 'idle'
    planned_ns: float
    measured_ns: float


class BesidePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan beside what its ranks did: the parts add up to both steps."""

    model: str
    gpus: int
    planned_ns: float
    measured_ns: float
    parts: tuple[PlannedPart, ...]
    hidden_planned_ns: float  # communication behind computing
    hidden_measured_ns: float
    notes: tuple[str, ...] = ()


class RanksExplanation(Printed, msgspec.Struct, frozen=True, kw_only=True):
    """What the traces of several ranks say together."""

    name: str  # the folder, or what the files' names have in common
    source: str
    gpu: str
    world: int  # ranks of the job; 0: not known
    missing: tuple[int, ...]  # ranks of the job without a trace
    steps: tuple[str, ...]  # that the figures are of
    step_ns: float  # of the job: from the first rank's beginning to the last one's end
    ranks: tuple[RankTime, ...]
    groups: tuple[GroupKind, ...]  # the longest first
    collectives: tuple[CollectiveTime, ...]  # those that take longest
    collectives_found: int
    unmatched: int  # collectives found on one rank only, or of another kind on each
    straggler: Straggler | None
    stragglers: tuple[Straggler, ...]  # the others, by what they cost
    late_groups: tuple[str, ...] = ()  # whose collectives ranks call in different orders
    clock_residual_ns: float  # how far apart collectives end once the clocks are aligned, median
    clocks_joined: bool
    verdict: str = ""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    note_keys: tuple[str, ...] = ()
    timeline: RanksTimeline | None = None
    plan: BesidePlan | None = None

    def headline(self) -> str:
        return f"{self.name}: {len(self.ranks)} ranks, {self.verdict}"

    def mean_ns(self, part: str) -> float:
        """A part of the step, mean over the ranks."""
        return sum(float(getattr(one, f"{part}_ns")) for one in self.ranks) / max(1, len(self.ranks))
