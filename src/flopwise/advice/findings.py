"""All rules over one step: what is worth reporting, the largest first, nothing counted twice."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flopwise import units
from flopwise.advice.constants import LEAST_SAVING_BYTES, LEAST_SAVING_NS, LEAST_SAVING_SHARE, SHORT_STEP_SHARE
from flopwise.advice.facts import Facts
from flopwise.advice.host_facts import HostFacts
from flopwise.advice.host_rules import ALL_HOST_RULES
from flopwise.advice.rank_facts import RankFacts
from flopwise.advice.rank_rules import ALL_RANK_RULES
from flopwise.advice.rules import ALL_RULES
from flopwise.analysis.verdict import CAPTURE
from flopwise.records.finding import Finding

# They change what is trained or served, not only how: reported after all others.
CHANGE_THE_WORK = ("small_batch", "decode_batch", "long_prefill")
FOR_THE_OTHERS = "host_next"  # reported where the others need it


def findings(facts: Facts) -> tuple[Finding, ...]:
    """What the rules find, ranked by what it saves; `counted_ns` is what each still saves after those before it.

    The counted savings add up to no more than the step. Nothing is reported where nothing is wrong.
    """
    if facts.explanation is not None and facts.explanation.bound == CAPTURE:
        return ()  # its kernels do not run: there is nothing to save
    reported = _reported(facts)
    others = [one for one in reported if one.rule != FOR_THE_OTHERS]
    found = ranked(others, facts)
    if facts.host_ns is None or facts.step_ns - counted_ns(found) >= facts.host_ns:
        return found
    launches = _of_launches(others) or _of_launches(reported)  # the host would hold up what the others save
    rest = [one for one in others if one not in launches]
    found = ranked(rest, facts, [msgspec.structs.replace(one, enables=True) for one in launches])
    return _largest_first(found, facts.step_ns - facts.host_ns)


def _largest_first(found: tuple[Finding, ...], room_ns: float) -> tuple[Finding, ...]:
    """Before the one that the others need goes the largest of them, if the host leaves it room to save more by itself.

    It then saves what there is room for, and the one that it needs the rest: together as much as in the other order.
    """
    if len(found) < 2 or not found[0].enables or found[1].enables or found[1].rule in CHANGE_THE_WORK:
        return found
    needed, largest = found[0], found[1]
    all_ns = largest.counted_ns or 0.0
    alone_ns = min(all_ns, room_ns)
    if alone_ns <= (needed.counted_ns or 0.0):
        return found
    held_ns = all_ns - alone_ns
    why = f"; {units.duration(held_ns)} that '{largest.title}' saves only with it" if held_ns else ""
    both = (
        msgspec.structs.replace(largest, counted_ns=alone_ns),
        msgspec.structs.replace(
            needed, counted_ns=(needed.counted_ns or 0.0) + held_ns, arithmetic=needed.arithmetic + why
        ),
    )
    return (*both, *found[2:])


def _reported(facts: Facts) -> list[Finding]:
    reported: list[Finding] = []
    for rule in ALL_RULES:
        found = rule.check(facts)
        reported += [found] if isinstance(found, Finding) else list(found or ())
    return reported


def _of_launches(found: Iterable[Finding]) -> list[Finding]:
    return [one for one in found if one.levers.get("graph") == "on"]


def changes(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that make the step shorter and leave what is trained as it is: with all of them it is the reachable step."""
    return tuple(
        one for one in found if ((one.counted_ns or 0.0) > 0 or one.enables) and one.rule not in CHANGE_THE_WORK
    )


def worth_most(found: Iterable[Finding], most: int = 3) -> tuple[Finding, ...]:
    """The changes that save most, in the order in which each saves that; what they need is among them."""
    made = changes(found)
    best = sorted(made, key=lambda one: (not one.enables, -(one.counted_ns or 0.0)))[:most]
    return tuple(one for one in made if one in best)


def counted_ns(found: Iterable[Finding]) -> float:
    """What all changes save together."""
    return sum(one.counted_ns or 0.0 for one in changes(found))


def host_findings(facts: HostFacts) -> tuple[Finding, ...]:
    """The same of a step on the CPU."""
    return ranked(filter(None, (rule.check(facts) for rule in ALL_HOST_RULES)), facts)


def rank_findings(facts: RankFacts) -> tuple[Finding, ...]:
    """The same of several ranks; after those that save time, what is wrong whatever it costs."""
    found = [one for rule in ALL_RANK_RULES if (one := rule.check(facts)) is not None]
    remarks = [one for one in found if not one.draws_on]
    return (*ranked([one for one in found if one.draws_on], facts), *remarks)


def ranked(
    reported: Iterable[Finding], facts: Facts | HostFacts | RankFacts, first: Sequence[Finding] = ()
) -> tuple[Finding, ...]:
    """Those worth reporting, the largest first, each with what it still saves after those before it; before all, `first`."""
    step_ns = facts.step_ns
    worth = [
        one for one in reported if one.saving_bytes >= LEAST_SAVING_BYTES or potential_ns(one) >= least_ns(step_ns)
    ]
    worth.sort(
        key=lambda one: (
            one.rule in CHANGE_THE_WORK,
            -potential_ns(one),
            -one.saving_bytes,
            one.rule,
            tuple(one.levers),
        )
    )
    worth = [*first, *worth]
    left, whole, counted = _budget(worth, facts), step_ns, []
    pulled = set[str]()  # a lever has one value: of two findings that would set it, the first counts
    for one in worth:
        wanted = {} if pulled & set(one.levers) else one.draws_on or {"": one.saving_ns}
        pulled |= set(one.levers)
        taken = {part: min(ns, left.get(part, whole)) for part, ns in wanted.items()}
        part_ns = min(sum(taken.values()), whole)
        for part, ns in taken.items():
            left[part] = left.get(part, whole) - ns
        whole -= part_ns
        arithmetic = one.arithmetic + (_after_the_others(taken, part_ns) if part_ns > one.saving_ns else "")
        counted.append(msgspec.structs.replace(one, counted_ns=part_ns, arithmetic=arithmetic))
    return tuple(counted)


def _after_the_others(taken: Mapping[str, float], whole_ns: float) -> str:
    """Where the saving comes from that other findings still stand in the way of."""
    parts = " + ".join(f"{units.duration(ns)} of '{part}'" for part, ns in taken.items() if ns > 0 and part)
    return f"; once the others are fixed: {parts} = {units.duration(whole_ns)}" if parts else ""


def potential_ns(one: Finding) -> float:
    """What it can save: by itself, or once the findings that stand in its way are fixed."""
    return max(one.saving_ns, sum(one.draws_on.values()))


def least_ns(step_ns: float) -> float:
    """The smallest saving that is reported."""
    return max(LEAST_SAVING_SHARE * step_ns, min(LEAST_SAVING_NS, SHORT_STEP_SHARE * step_ns))


def _budget(worth: Sequence[Finding], facts: Facts | HostFacts | RankFacts) -> dict[str, float]:
    """What each part of the step has to give: its time in the waterfall; without one, the most that any finding draws."""
    names = {part for one in worth for part in one.draws_on}
    if facts.waterfall is not None:
        return {part: max(0.0, facts.waterfall.ns(part)) for part in names}
    return {part: max(one.draws_on.get(part, 0.0) for one in worth) for part in names}
