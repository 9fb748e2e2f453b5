"""The GPU runs below its clock: power, heat or a limit that someone has set.

Looks for: NVML's throttle reasons and a median SM clock, while the GPU is at work, more than {THROTTLED_SHARE:%} below the
fastest seen (or, where a GPU's matmul clock is known, below that).
Saving: GPU time × (1 − median clock / fastest clock).
Fix: cooling, a higher power limit, locked clocks. Under a power cap fewer FLOPs raise the clock, and fewer bytes lower it.
"""

from statistics import median

from flopwise import units
from flopwise.advice.constants import BUSY_PERCENT, THROTTLED_SHARE
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, gpu_time_saved
from flopwise.analysis.clocks import CAP
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.run import Telemetry
from flopwise.records.waterfall import BELOW_BANDWIDTH, IDEAL, MATMUL_OTHER

CODE = """nvidia-smi -q -d PERFORMANCE,CLOCK,POWER      # what limits it
sudo nvidia-smi -pl 700                       # the power limit, in watts
sudo nvidia-smi -lgc 1830                     # a clock that it can hold"""
RULE = Rule(__name__, (IDEAL, MATMUL_OTHER, BELOW_BANDWIDTH), code=CODE)


def check(facts: Facts) -> Finding | None:
    seen, busy = facts.point.telemetry if facts.point is not None else None, facts.gpu_ns
    if seen is None or not seen.throttle or not seen.sm_mhz or not busy:
        return None
    clock, fastest = _clocks(facts, seen)
    lost = 1 - clock / fastest
    if lost < THROTTLED_SHARE:
        return None
    reasons = ", ".join(seen.throttle)
    arithmetic = (
        f"{units.duration(busy)} × (1 − {clock:.0f} / {fastest:.0f} MHz) = {units.duration(busy * lost)} of GPU time"
    )
    heat = f"{max(seen.temperature_c, default=0)} °C, {max(seen.power_mw, default=0) / 1000:.0f} W at most"
    title = f"clocks are throttled: {clock:.0f} of {fastest:.0f} MHz ({reasons})"
    saving = gpu_time_saved(facts, busy * lost, arithmetic, LOW if seen.throttle == (CAP,) else MEDIUM)
    return RULE.finding(
        facts, title, saving, (f"reasons: {reasons}", heat), evidence_ns=busy, clock_mhz=clock, fastest_mhz=fastest
    )


def _clocks(facts: Facts, seen: Telemetry) -> tuple[float, float]:
    """The clock in MHz while the GPU was at work, and the fastest it has."""
    at_work = [mhz for mhz, load in zip(seen.sm_mhz, seen.utilisation, strict=False) if load >= BUSY_PERCENT]
    rated = facts.gpu.tensor_clock_hz if facts.gpu is not None else None
    return float(median(at_work or seen.sm_mhz)), rated / 1e6 if rated else float(max(seen.sm_mhz))
