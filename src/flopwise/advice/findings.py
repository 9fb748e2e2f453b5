"""All rules over one step: what is worth saying, the largest first, nothing counted twice."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flopwise import units
from flopwise.advice import measured
from flopwise.advice.facts import Facts
from flopwise.advice.rules import (
    checkpointing,
    eager_pieces,
    exposed_communication,
    exposed_optimizer,
    fp32_logits,
    fp32_matmul,
    fragmentation,
    graph_breaks,
    host_syncs,
    input_stalls,
    launch_bound,
    naive_attention,
    repeated_casts,
    slow_optimizer,
    slow_sdpa,
    small_batch,
    tf32_off,
    throttled,
    unaligned,
    unfused_chains,
    zeroed_gradients,
)
from flopwise.records.finding import Finding

RULES = (
    launch_bound, fp32_matmul, tf32_off, naive_attention, slow_sdpa, unfused_chains, eager_pieces, slow_optimizer,
    fp32_logits, unaligned, small_batch, host_syncs, repeated_casts, zeroed_gradients, input_stalls, fragmentation,
    checkpointing, throttled, graph_breaks, exposed_communication,
    exposed_optimizer,
)  # fmt: skip

CHANGE_THE_WORK = ("small_batch",)  # they change what is trained, not only how: said after all that do not
LEAST_SHARE = 0.01  # of the step: less is not worth a line
LEAST_NS, SHORT_SHARE = 100_000.0, 0.05  # nor is less than 0.1 ms, unless it is a twentieth of a short step
LEAST_BYTES = 2**28


def findings(facts: Facts) -> tuple[Finding, ...]:
    """What the rules find, ranked by what it saves; `counted_ns` is what each still saves after those before it.

    The counted savings add up to no more than the step. Nothing is said where nothing is wrong.
    """
    said: list[Finding] = []
    for rule in RULES:
        found = rule.check(facts)
        said += [found] if isinstance(found, Finding) else list(found or ())
    return ranked(said, facts)


def ranked(said: Iterable[Finding], facts: Facts) -> tuple[Finding, ...]:
    """Those worth saying, the largest first, each with what it still saves after those before it."""
    step = measured.step_ns(facts)
    worth = [one for one in said if one.saving_bytes >= LEAST_BYTES or potential_ns(one) >= least_ns(step)]
    worth.sort(
        key=lambda one: (one.rule in CHANGE_THE_WORK, -potential_ns(one), -one.saving_bytes, one.rule, one.title)
    )
    left, whole, counted = _budget(worth, facts), step, []
    pulled = set[str]()  # a lever has one place: of two findings that would set it, the first counts
    for one in worth:
        wanted = {} if pulled & set(one.levers) else one.draws_on or {"": one.saving_ns}
        pulled |= set(one.levers)
        taken = {part: min(ns, left.get(part, whole)) for part, ns in wanted.items()}
        part_ns = min(sum(taken.values()), whole)
        for part, ns in taken.items():
            left[part] = left.get(part, whole) - ns
        whole -= part_ns
        arithmetic = one.arithmetic + (_once_mended(taken, part_ns) if part_ns > one.saving_ns else "")
        counted.append(msgspec.structs.replace(one, counted_ns=part_ns, arithmetic=arithmetic))
    return tuple(counted)


def _once_mended(taken: Mapping[str, float], whole_ns: float) -> str:
    """Where the saving comes from that others still stand in the way of."""
    parts = " + ".join(f"{units.duration(ns)} of '{part}'" for part, ns in taken.items() if ns > 0 and part)
    return f"; once the others are mended, too: {parts} = {units.duration(whole_ns)}" if parts else ""


def potential_ns(one: Finding) -> float:
    """What it can save: by itself, or once the findings that stand in its way are mended, too."""
    return max(one.saving_ns, sum(one.draws_on.values()))


def least_ns(step_ns: float) -> float:
    """The smallest saving that is said."""
    return max(LEAST_SHARE * step_ns, min(LEAST_NS, SHORT_SHARE * step_ns))


def _budget(worth: Sequence[Finding], facts: Facts) -> dict[str, float]:
    """What each part of the step has to give: its time in the waterfall; without one, the most that any finding draws."""
    names = {part for one in worth for part in one.draws_on}
    if facts.waterfall is not None:
        return {part: max(0.0, facts.waterfall.ns(part)) for part in names}
    return {part: max(one.draws_on.get(part, 0.0) for one in worth) for part in names}
