"""What a rule reports: the problem, its evidence, what fixing it would save, and how."""

import msgspec

HIGH, MEDIUM, LOW = "high", "medium", "low"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a step is slow or large, and what to do about it.

    `draws_on` names the parts of the waterfall (its PARTS) from which the saving comes, in nanoseconds: two findings that
    draw on the same nanoseconds do not save them twice.
    """

    rule: str  # the finding's key: the rule's file name, 'launch_bound'
    title: str  # the problem in one line, with its number
    values: dict[str, float] = {}  # the numbers behind the title, by name: {'late_ns': 6.1e6}
    saving_ns: float = 0.0  # predicted, of one step, by itself
    saving_bytes: int = 0  # predicted, of the peak
    arithmetic: str  # how the saving was computed, with its numbers
    evidence: tuple[str, ...] = ()  # numbers, kernels by name, lines of code
    kernels: tuple[str, ...] = ()  # the names of the kernels in its evidence, whole
    levers: dict[str, str] = {}  # the recipe's levers that fix it: {'graph': 'on'}; empty: by hand
    code: str = ""  # the lines of PyTorch that do it
    confidence: str = MEDIUM
    draws_on: dict[str, float] = {}
    evidence_ns: float | None = None  # what its evidence adds up to, of one step: no saving is more; None: by the model
    counted_ns: float | None = None  # what it still saves after the findings before it; set by the ranking
    enables: bool = False  # the others save what is counted for them only with this one; set by the ranking

    @property
    def key(self) -> str:
        """Identifies it, whatever its title."""
        return self.rule
