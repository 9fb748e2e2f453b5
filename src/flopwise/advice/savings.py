"""What a fix saves: by the model of the step where the workload is known, else from the trace alone."""

from collections.abc import Iterable, Mapping

import msgspec

from flopwise import units
from flopwise.advice.constants import HOST_BOUND_SHARE, REACHED_BANDWIDTH
from flopwise.advice.facts import Evidence, Facts
from flopwise.advice.predicted import predicted_change
from flopwise.analysis.idle import LATE_LAUNCH
from flopwise.records.ceilings import MEASURED
from flopwise.records.finding import HIGH, LOW, MEDIUM, Finding


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """What a change saves."""

    alone_ns: float  # of the step, if nothing else is changed
    freed_ns: float  # of the GPU's time, whether or not the host lets the step get shorter by it
    arithmetic: str
    confidence: str = MEDIUM
    by_model: bool = False  # predicted from the workload, not from what was traced

    def within(self, evidence_ns: float | None) -> "Saving":
        """The same, no more than what was measured."""
        if self.by_model or evidence_ns is None or self.freed_ns <= evidence_ns:
            return self
        least = min(self.alone_ns, evidence_ns)
        return msgspec.structs.replace(self, alone_ns=least, freed_ns=evidence_ns)


def idle_saved(ns: float, arithmetic: str, confidence: str) -> Saving:
    """Time in which the GPU was idle: the step gets shorter by all of it."""
    return Saving(alone_ns=ns, freed_ns=ns, arithmetic=arithmetic, confidence=confidence)


def memory_saved(arithmetic: str, confidence: str = MEDIUM) -> Saving:
    """Memory alone, no time."""
    return Saving(alone_ns=0.0, freed_ns=0.0, arithmetic=arithmetic, confidence=confidence)


def gpu_time_saved(facts: Facts, freed_ns: float, arithmetic: str, confidence: str = MEDIUM) -> Saving:
    """GPU time no longer spent. The step keeps what the host does not need anyway: down to the host's own work where that is
    known; else the less, the more of the step the GPU waits for launches."""
    step, host = facts.step_ns, facts.host_ns
    if host is not None and (untraced := facts.untraced_step) is not None:
        alone = min(freed_ns, max(0.0, untraced.ns - host))
        why = f"the host is busy for {units.duration(host)} of the step"
    else:
        late = facts.idle_ns(LATE_LAUNCH) / step if step else 0.0
        alone = freed_ns * max(0.0, 1 - late / HOST_BOUND_SHARE)
        why = f"the GPU waits for launches {units.percent(late, 0)} of the step"
    limited = f"{arithmetic}; by itself {units.duration(alone)}: {why}"
    nearly_all = alone > 0.95 * freed_ns
    return Saving(
        alone_ns=alone, freed_ns=freed_ns, arithmetic=arithmetic if nearly_all else limited, confidence=confidence
    )


def reading_saved(facts: Facts, spent_ns: float, n_bytes: float) -> tuple[Saving, str] | None:
    """What reading these bytes at the bandwidth that kernels reach would save, and at which rate they were read; None: nothing,
    or the bandwidth is not known."""
    if not facts.bandwidth:
        return None
    least = n_bytes / (REACHED_BANDWIDTH * facts.bandwidth) * 1e9
    if least >= spent_ns:
        return None
    arithmetic = (
        f"{units.duration(spent_ns)} − {units.size(n_bytes)} at {units.percent(REACHED_BANDWIDTH, 0)} of "
        f"{units.rate(facts.bandwidth, 'B/s')} ({units.duration(least)}) = {units.duration(spent_ns - least)}"
    )
    rate = n_bytes / spent_ns * 1e9
    share = units.percent(rate / facts.bandwidth, 0)
    saving = gpu_time_saved(facts, spent_ns - least, arithmetic, LOW)
    return saving, f"{units.rate(rate, 'B/s')}, {share} of the memory's bandwidth"


def predicted_or(facts: Facts, levers: Mapping[str, str], otherwise: Saving) -> Saving:
    """By the model with `levers` changed; where it cannot say, `otherwise`, from the trace."""
    change = predicted_change(facts, levers)
    if change is None:
        return otherwise
    measured = facts.untraced_ns and facts.ceilings is not None and facts.ceilings.how == MEASURED
    return Saving(
        alone_ns=change.saving_ns,
        freed_ns=max(change.saving_ns, change.gpu_saving_ns),
        arithmetic=change.arithmetic,
        confidence=HIGH if measured else MEDIUM,
        by_model=True,
    )


class Rule(msgspec.Struct, frozen=True):
    """What every finding of a rule has in common."""

    module: str  # `__name__`; its last word is the findings' key
    parts: tuple[
        str, ...
    ] = ()  # of the waterfall, from which the saving comes: as much of the first as it holds, then the next
    levers: dict[str, str] = {}
    code: str = ""

    def finding(
        self,
        facts: Facts,
        title: str,
        saving: Saving,
        evidence: Iterable[str | Evidence] = (),
        saving_bytes: int = 0,
        *,
        evidence_ns: float | None = None,
        **values: float,
    ) -> Finding:
        """What the rule reports; `values` are the numbers of its title, `evidence_ns` what its evidence adds up to."""
        saving = saving.within(evidence_ns)
        lines = [line if isinstance(line, Evidence) else Evidence(line) for line in evidence]
        return Finding(
            rule=self.module.rpartition(".")[2],
            title=title,
            values=values,
            saving_ns=max(0.0, saving.alone_ns),
            saving_bytes=saving_bytes,
            arithmetic=saving.arithmetic,
            evidence=tuple(line.text for line in lines),
            kernels=tuple(line.kernel for line in lines if line.kernel),
            levers=self.levers,
            code=self.code,
            confidence=saving.confidence,
            draws_on=draws(facts, saving.freed_ns, *self.parts),
            evidence_ns=None if saving.by_model else evidence_ns,
        )


def draws(facts: Facts, ns: float, *parts: str) -> dict[str, float]:
    """From which parts of the waterfall a saving comes; without a waterfall all of it comes from the first.

    What no part holds is not counted."""
    if facts.waterfall is None or not parts:
        return dict.fromkeys(parts[:1], max(0.0, ns))
    found, left = dict[str, float](), max(0.0, ns)
    for part in parts:
        taken = min(left, max(0.0, facts.waterfall.ns(part)))
        if taken > 0:
            found[part], left = taken, left - taken
    return found
