"""Whether the power cap held the GPU's clock down while a step was measured."""

from statistics import median

from flopwise.records.run import Telemetry

CAP = "software power cap"  # what large matmuls meet on a healthy chip
LOWERED = 0.96  # of the clock: above that, the cap was met for moments only


def held_clock(telemetry: Telemetry | None) -> tuple[float, int] | None:
    """The clock in MHz that the cap left while the GPU was busiest, and the highest seen; None where it took none.

    >>> held_clock(Telemetry(sm_mhz=(1980, 1980, 1600, 1620), power_mw=(120, 300, 698, 695), throttle=(CAP,)))
    (1600, 1980)
    """
    if telemetry is None or CAP not in telemetry.throttle:
        return None
    by_power = sorted(zip(telemetry.power_mw, telemetry.sm_mhz, strict=False))
    if not by_power:
        return None
    clock, highest = median(mhz for _, mhz in by_power[-max(1, len(by_power) // 4) :]), max(telemetry.sm_mhz)
    return (clock, highest) if clock < LOWERED * highest else None
