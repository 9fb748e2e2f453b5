"""What is to be said of a measured step beyond its times: a busy machine; of a training loop, where its host waited."""

from signal import SIGTERM
from statistics import median

from flopwise import units
from flopwise.records.run import Point

_HUNG_UP = 128 + 1  # SIGHUP, which Windows does not name
CLOCK_TIMES = 5  # a step is too short to be timed if it takes no more than so many empty ones
_LEAST = 0.001  # of the time: less is not mentioned


def loop_notes(point: Point) -> list[str]:
    """Sentences for a point of a watched loop; of another, why to doubt it and whether the machine was busy."""
    loop, times = point.loop, point.times()
    busy = [line for line in (doubt(point), while_busy(point)) if line]
    if loop is None or times is None:
        return busy
    apart_ns = sum(map(sum, loop.apart_ns.values()))
    apart = _by_cause(loop.apart_ns, len(times.wall_ns), sum(times.wall_ns) + apart_ns)
    waits = _by_cause(loop.waits_ns, len(times.wall_ns), sum(times.wall_ns))
    notes = busy + [f"between steps, not counted above, on average: {apart}"] * bool(apart)
    notes += [f"in a step the script waited, on average: {waits}"] if waits else []
    if loop.micro_steps > 1:
        notes.append(f"{loop.micro_steps} backward passes a step: gradients are accumulated")
    if loop.updates > 1:
        notes.append(f"{loop.updates} updates a step: several optimizers, or one that updates more than once")
    if loop.rank_walls_ns:
        each = [median(walls) for walls in (times.wall_ns, *loop.rank_walls_ns.values()) if walls]
        notes.append(f"{len(each)} ranks: {units.duration(min(each))} to {units.duration(max(each))} a step")
    if loop.exit_code:
        killed = loop.exit_code in (128 + SIGTERM, _HUNG_UP)
        notes.append("the script was killed" if killed else f"the script ended with exit code {loop.exit_code}")
    return notes


def doubt(point: Point) -> str:
    """Why the times of an ok point may mean little; '' where nothing is known."""
    return "; ".join(filter(None, (_not_finite(point), _too_short(point))))


def _not_finite(point: Point) -> str:
    """That the last loss is no number: such a step may be faster, or slower, than one that trains."""
    bad = point.ran.bad_loss if point.ran is not None else ""
    return f"the loss of the last step is {bad}: this is not a step that trains" if bad else ""


def _too_short(point: Point) -> str:
    """That the clock cannot tell how long the step is."""
    times = point.times()
    if times is None or not times.wall_ns or median(times.wall_ns) > CLOCK_TIMES * point.clock_ns:
        return ""
    return "the step is too short for the clock: an empty one takes a fifth of its time or more; do more in a step"


def while_busy(point: Point) -> str:
    """What other processes used of the machine meanwhile; '' where it does not matter."""
    there = f" of {point.environment.cpu_cores}" if point.environment is not None else ""
    return f"the machine was busy: other processes used {point.busy_cores:.1f}{there} cores" if point.busy_cores else ""


def _by_cause(spent_ns: dict[str, tuple[int, ...]], steps: int, whole_ns: int) -> str:
    """On average per step and as a share, the largest first; what rounds to nothing is left out.

    >>> _by_cause({"a": (1_000, 3_000), "b": (9, 0)}, 2, 20_000)
    'a 2.00 µs (20.0 %)'
    """
    ranked = sorted(((sum(ns), cause) for cause, ns in spent_ns.items()), reverse=True)
    worth = [(ns, cause) for ns, cause in ranked if whole_ns and ns >= _LEAST * whole_ns]
    return ", ".join(f"{cause} {units.duration(ns / steps)} ({units.percent(ns / whole_ns)})" for ns, cause in worth)
