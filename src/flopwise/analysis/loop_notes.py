"""What is to be said of a training loop beyond its step: where its host waited, micro-steps, ranks."""

from statistics import median

from flopwise import units
from flopwise.records.run import Point


def loop_notes(point: Point) -> list[str]:
    """Sentences for a point of a watched loop; none of another."""
    loop, times = point.loop, point.times()
    if loop is None or times is None:
        return []
    total_ns, steps = sum(times.wall_ns), len(times.wall_ns)
    waits = {cause: sum(ns) for cause, ns in loop.waits_ns.items()}
    told = [
        f"{cause} {units.duration(ns / steps)} ({units.percent(ns / total_ns)})"
        for cause, ns in sorted(waits.items(), key=lambda one: -one[1])
        if total_ns and ns > 0
    ]
    notes = [f"the script waited, on average per step: {', '.join(told)}"] if told else []
    if loop.micro_steps > 1:
        notes.append(f"{loop.micro_steps} backward passes a step: gradients are accumulated")
    if loop.updates > 1:
        notes.append(f"{loop.updates} updates a step: several optimizers, or one that updates more than once")
    if loop.rank_walls_ns:
        each = [median(walls) for walls in (times.wall_ns, *loop.rank_walls_ns.values()) if walls]
        notes.append(f"{len(each)} ranks: {units.duration(min(each))} to {units.duration(max(each))} a step")
    if loop.exit_code:
        notes.append(f"the script ended by itself with exit code {loop.exit_code}")
    return notes
