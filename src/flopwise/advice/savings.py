"""How a saving is reckoned: by the model of the step where the workload is known, else from the trace alone."""

from collections.abc import Mapping
from typing import Any

import msgspec

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.predicted import predicted_step
from flopwise.analysis.idle import LATE_LAUNCH
from flopwise.records.ceilings import MEASURED
from flopwise.records.finding import HIGH, LOW, MEDIUM, Finding

HOST_DICTATES = 0.5  # of the step idle by late launches: what the GPU then does faster, it waits longer


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """What a change saves."""

    alone_ns: float  # of the step, if nothing else is changed
    freed_ns: float  # of the GPU's time, whether the host lets the step become shorter by it or not
    arithmetic: str
    confidence: str = MEDIUM


def reckoned(
    facts: Facts, levers: Mapping[str, str], freed_ns: float, arithmetic: str, confidence: str = LOW
) -> Saving:
    """By the model with `levers` changed; where it cannot tell, `freed_ns` of GPU time by `arithmetic` from the trace."""
    model = predicted_step(facts, levers) if levers else None
    if model is None:
        return freed(facts, freed_ns, arithmetic, confidence)
    sure = (
        HIGH
        if measured.untraced_ns(facts) and facts.ceilings is not None and facts.ceilings.how == MEASURED
        else MEDIUM
    )
    return Saving(
        alone_ns=model.saving_ns,
        freed_ns=max(model.saving_ns, model.gpu_saving_ns),
        arithmetic=model.arithmetic,
        confidence=sure,
    )


def freed(facts: Facts, freed_ns: float, arithmetic: str, confidence: str = MEDIUM) -> Saving:
    """GPU time that is no longer spent. Of it the step keeps what the host does not need anyhow: down to the time that the
    host is busy, where that was measured; else the less, the more of the step the GPU waits for launches."""
    step, host = measured.step_ns(facts), measured.launch_ns(facts)
    if host is not None and (untraced := measured.untraced_ns(facts)):
        alone, why = (
            min(freed_ns, max(0.0, untraced - host)),
            f"the host is busy for {units.duration(host)} of the step",
        )
    else:
        late = measured.idle_ns(facts, LATE_LAUNCH) / step if step else 0.0
        alone, why = freed_ns * max(0.0, 1 - late / HOST_DICTATES), f"the GPU waits for launches {late:.0%} of the step"
    said = arithmetic if alone > 0.95 * freed_ns else f"{arithmetic}; by itself {units.duration(alone)}: {why}"
    return Saving(alone_ns=alone, freed_ns=freed_ns, arithmetic=said, confidence=confidence)


def draws(facts: Facts, ns: float, *parts: str) -> dict[str, float]:
    """From which parts of the waterfall a saving comes: of the first as much as it holds, then of the next.

    Without a waterfall all of it comes from the first. What no part holds stays undrawn, and is not counted."""
    if facts.waterfall is None:
        return {parts[0]: max(0.0, ns)}
    found, left = dict[str, float](), max(0.0, ns)
    for part in parts:
        taken = min(left, max(0.0, facts.waterfall.ns(part)))
        if taken > 0:
            found[part], left = taken, left - taken
    return found


def finding(facts: Facts, rule: str, title: str, saving: Saving, parts: tuple[str, ...], **more: Any) -> Finding:
    """What a rule says, with its saving and the parts that this comes from; `rule` is the module's `__name__`."""
    return Finding(
        rule=rule.rpartition(".")[2],
        title=title,
        saving_ns=max(0.0, saving.alone_ns),
        arithmetic=saving.arithmetic,
        draws_on=draws(facts, saving.freed_ns, *parts),
        **({"confidence": saving.confidence} | more),
    )
