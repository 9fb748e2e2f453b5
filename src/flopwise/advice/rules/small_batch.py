"""The batch is too small for the chip: more tokens would cost little more time.

Looks for: a batch that at least doubles within the memory (the largest batch that is predicted to fit) and then takes
{BATCH_GAIN:%} less time a token, by the model.
Saving: of the time that today's tokens take: step − (step with a larger batch) × batch / larger batch. The batch named is the
first doubling after which another saves less than {BATCH_GAIN_MORE:%} more.
Fix: a larger batch, or fewer steps of gradient accumulation with larger ones. It changes the training unless accumulation
shrinks with it.
"""

from flopwise import units
from flopwise.advice.constants import BATCH_GAIN, BATCH_GAIN_MORE, BATCH_TIMES
from flopwise.advice.facts import Facts
from flopwise.advice.predicted import PredictedChange, baseline, largest_batch, predicted_change
from flopwise.advice.savings import Rule, idle_saved
from flopwise.records import waterfall as part
from flopwise.records.finding import MEDIUM, Finding

PARTS = (
    *(part.IDLE_LAUNCH, part.MATMUL_SHAPE, part.OPTIMIZER_PART),
    *(part.BELOW_BANDWIDTH, part.MATMUL_OTHER, part.IDLE_OTHER),
)


def check(facts: Facts) -> Finding | None:
    if facts.workload is None or baseline(facts) is None:
        return None
    batch, fits = facts.workload.batch, largest_batch(facts)
    best, gain, times = None, 0.0, 2
    while times <= BATCH_TIMES and batch * times <= fits:
        larger = predicted_change(facts, {}, batch=batch * times)
        if larger is None:
            return None
        saved = 1 - larger.then.wall_ns / times / larger.now.wall_ns
        if saved < gain + BATCH_GAIN_MORE:
            break
        best, gain, times = (larger, times), saved, times * 2
    if best is None or gain < BATCH_GAIN:
        return None
    return _finding(facts, *best, batch, gain, fits)


def _finding(facts: Facts, change: PredictedChange, times: int, batch: int, gain: float, fits: int) -> Finding:
    step = facts.step_ns or change.now.wall_ns
    now, then = units.duration(change.now.wall_ns), units.duration(change.then.wall_ns)
    arithmetic = (
        f"model of the step: {now} at batch {batch}, {then} at batch {batch * times}: "
        f"1 − {then} / {times} / {now} = {units.percent(gain)} of {units.duration(step)} for the same tokens"
    )
    title = f"batch {batch} is too small for the chip: batch {batch * times} takes {units.percent(gain, 0)} less time a token"
    rule = Rule(__name__, PARTS, code=f"batch = {batch * times}      # from {batch}; up to {fits} fit")
    saving, evidence = idle_saved(gain * step, arithmetic, MEDIUM), (f"batch {fits} is the largest predicted to fit",)
    return rule.finding(facts, title, saving, evidence, batch=batch, larger_batch=batch * times, largest_batch=fits)
