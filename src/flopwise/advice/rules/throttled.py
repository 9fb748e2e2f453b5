"""The GPU runs below its clock: power, heat or a limit that someone has set.

Looks for: NVML's throttle reasons and a median SM clock, while the GPU is at work, more than 3 % below the fastest seen (or,
where a GPU's matmul clock is known, below that).
Saving: GPU time × (1 − median clock / fastest clock).
Mend: cooling, a higher power limit, locked clocks. Under a power cap fewer FLOPs raise the clock, and fewer bytes lower it.
"""

from statistics import median

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.savings import finding, freed
from flopwise.analysis.clocks import CAP
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.waterfall import BELOW_BANDWIDTH, IDEAL, MATMUL_OTHER

LEAST, AT_WORK = 0.03, 50  # of the clock; per cent of utilisation
CODE = """nvidia-smi -q -d PERFORMANCE,CLOCK,POWER      # what limits it
sudo nvidia-smi -pl 700                       # the power limit, in watts
sudo nvidia-smi -lgc 1830                     # a clock that it can hold"""


def check(facts: Facts) -> Finding | None:
    """One finding, or none."""
    seen, gpu, busy = (
        facts.point.telemetry if facts.point is not None else None,
        measured.gpu_of(facts),
        measured.gpu_ns(facts),
    )
    if seen is None or not seen.throttle or not seen.sm_mhz or not busy:
        return None
    at_work = [mhz for mhz, load in zip(seen.sm_mhz, seen.utilisation, strict=False) if load >= AT_WORK] or list(
        seen.sm_mhz
    )
    rated = gpu.tensor_clock_hz / 1e6 if gpu is not None and gpu.tensor_clock_hz else 0.0
    clock, fastest = median(at_work), rated or float(max(seen.sm_mhz))
    lost = 1 - clock / fastest
    if lost < LEAST:
        return None
    reasons = ", ".join(seen.throttle)
    arithmetic = (
        f"{units.duration(busy)} × (1 − {clock:.0f} / {fastest:.0f} MHz) = {units.duration(busy * lost)} of GPU time"
    )
    heat = f"{max(seen.temperature_c, default=0)} °C, {max(seen.power_mw, default=0) / 1000:.0f} W at most"
    confidence = LOW if seen.throttle == (CAP,) else MEDIUM
    return finding(
        facts,
        __name__,
        f"clocks are throttled: {clock:.0f} of {fastest:.0f} MHz ({reasons})",
        freed(facts, busy * lost, arithmetic, confidence),
        (IDEAL, MATMUL_OTHER, BELOW_BANDWIDTH),
        evidence=(f"reasons: {reasons}", heat),
        code=CODE,
    )
