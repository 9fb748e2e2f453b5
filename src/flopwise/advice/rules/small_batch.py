"""The batch is too small for the chip: more tokens would cost little more time.

Looks for: a batch that at least doubles within the memory (the account's largest batch) and then takes 10 % less time a
token, by the model.
Saving: of the time that today's tokens take: step − (step with a larger batch) × batch / larger batch. The batch told is the
first doubling after which another saves less than 3 % more.
Mend: a larger batch, or fewer steps of gradient accumulation with larger ones. It changes the training unless accumulation
shrinks with it.
"""

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.predicted import Predicted, predicted_step
from flopwise.advice.savings import Saving, finding
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.waterfall import (
    BELOW_BANDWIDTH,
    IDLE_LAUNCH,
    IDLE_OTHER,
    MATMUL_OTHER,
    MATMUL_SHAPE,
    OPTIMIZER_PART,
)

LEAST, MORE, MOST_TIMES = 0.10, 0.03, 64


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    workload, fits = measured.workload_of(facts), _fits(facts)
    if workload is None or not fits:
        return None
    batch, best, gain, times = workload.batch, None, 0.0, 2
    while times <= MOST_TIMES and batch * times <= fits:
        found = predicted_step(facts, {}, batch=batch * times)
        if found is None:
            return None
        saved = 1 - found.then.wall_ns / times / found.now.wall_ns
        if saved < gain + MORE:
            break
        best, gain, times = (found, times), saved, times * 2
    if best is None or gain < LEAST:
        return None
    return _told(facts, *best, batch, gain, fits)


def _fits(facts: Facts) -> int:
    """The largest batch that the account found for this GPU."""
    gpu, account = measured.gpu_of(facts), facts.account
    rows = [one for one in (account.gpus if account is not None else ()) if gpu is None or one.gpu.name == gpu.name]
    return (rows[0].largest_batch or 0) if rows else 0


def _told(facts: Facts, model: Predicted, times: int, batch: int, gain: float, fits: int) -> Finding:
    step = measured.step_ns(facts) or model.now.wall_ns
    now, then = units.duration(model.now.wall_ns), units.duration(model.then.wall_ns)
    arithmetic = (
        f"model of the step: {now} at batch {batch}, {then} at batch {batch * times}: "
        f"1 − {then} / {times} / {now} = {units.percent(gain)} of {units.duration(step)} for the same tokens"
    )
    saving = Saving(alone_ns=gain * step, freed_ns=gain * step, arithmetic=arithmetic, confidence=MEDIUM)
    return finding(
        facts,
        __name__,
        f"batch {batch} is too small for the chip: batch {batch * times} takes {units.percent(gain, 0)} less time a token",
        saving,
        (IDLE_LAUNCH, MATMUL_SHAPE, OPTIMIZER_PART, BELOW_BANDWIDTH, MATMUL_OTHER, IDLE_OTHER),
        evidence=(f"batch {fits} is predicted to be the largest that fits",),
        code=f"batch = {batch * times}      # from {batch}; up to {fits} fit",
    )
