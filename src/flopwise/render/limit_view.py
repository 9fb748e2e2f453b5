"""A step against the power-capped roofline: in a sentence, and as a table."""

from flopwise import units
from flopwise.records.limit import StepLimit
from flopwise.records.table import Table
from flopwise.render.table import columns

LIMIT = "limit"
_MOST_CAUSES, _WORTH_NAMING = 4, 0.01  # of what remains


def limit_sentence(found: StepLimit) -> str:
    """The limit, and what takes most of the time beyond it."""
    some = [one for one in found.ranked() if one.beyond_ns >= _WORTH_NAMING * found.remaining_ns][:_MOST_CAUSES]
    causes = ", ".join(f"{one.name} {units.duration(one.beyond_ns)}" for one in some)
    beyond = f" Beyond it: {causes}." if causes and found.remaining_ns > 0 else ""
    name = limit_name(found)
    return f"{name[:1].upper()}{name[1:]}: {units.duration(found.limit_ns)}, {_share(found)} of the step.{beyond}"


def limit_name(found: StepLimit) -> str:
    """Whether the power cap is in it."""
    return f"power-capped limit ({found.clock_mhz:.0f} MHz)" if found.clock_mhz is not None else "roofline limit"


def limit_table(found: StepLimit) -> Table:
    """Each kind of work: what it took, what it must take, and how much of the remaining time it is."""
    rows = [
        {
            "cause": one.name,
            "ns": one.ns,
            "least_ns": one.least_ns,
            "beyond_ns": one.beyond_ns,
            "share": one.beyond_ns / found.remaining_ns if found.remaining_ns > 0 else None,
        }
        for one in sorted(found.causes, key=lambda one: -one.beyond_ns)
    ]
    whole = {"cause": "step", "ns": found.step_ns, "least_ns": found.limit_ns, "beyond_ns": found.remaining_ns}
    heading = "cause | ns: took [ms] | least_ns: limit [ms] | beyond_ns: beyond it [ms] | share: of the remaining time"
    title = f"To the {limit_name(found)}: {units.duration(found.limit_ns)} of {units.duration(found.step_ns)}"
    shown = columns(heading, keep="beyond_ns share")
    return Table(LIMIT, title, shown, (*rows, whole), limit_notes(found), total=True)


def limit_notes(found: StepLimit) -> tuple[str, ...]:
    """What the limit is made of."""
    peak, capped, moving = map(units.duration, (found.peak_ns, found.capped_ns, found.bytes_ns))
    words = [f"the limit: FLOPs at the datasheet's peak {peak}"]
    if found.clock_mhz is not None and found.peak_mhz is not None:
        clocks = f"{found.clock_mhz:.0f} MHz instead of {found.peak_mhz:.0f}"
        words.append(f"{capped} more as the power cap holds {clocks}")
    words += [f"bytes at full bandwidth {moving}"] if found.bytes_ns > 0 else []
    return ("; ".join(words), *found.notes)


def _share(found: StepLimit) -> str:
    return units.percent(found.limit_ns / found.step_ns, 0) if found.step_ns else ""
