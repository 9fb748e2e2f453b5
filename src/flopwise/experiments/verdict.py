"""What a claim is made of: checks, and the rules that make a verdict of them. No torch here.

`judge` of an experiment yields checks, in the order in which a reader should hear of them. `conclude` combines them:

1. A requirement that is not met ends the judgement with its own outcome: nothing after it is computed.
2. One refuted check refutes the claim.
3. Otherwise one inconclusive check leaves it open.
4. Otherwise the claim is confirmed.

The reason is the text of the checks, one after the other.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

from flopwise.experiments.rows import Interval, Moved, Timed, exact

CONFIRMED, REFUTED, INCONCLUSIVE, NOT_MEASURABLE = "confirmed", "refuted here", "inconclusive", "not measurable here"
VERDICTS = (CONFIRMED, REFUTED, INCONCLUSIVE, NOT_MEASURABLE)
# Shares of the memory's specified bandwidth: what is slower has another limit; what is faster was not moved by memory alone.
LEAST_OF_MEMORY, MOST_OF_MEMORY = 0.5, 1.1


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """One condition of a claim: its outcome, a text for the reader, and the numbers it was decided by."""

    key: str  # '' of a text that decides nothing
    outcome: str = CONFIRMED
    text: str = ""
    numbers: dict[str, float] = {}
    least: float | None = None  # the limits that the numbers have to keep
    most: float | None = None
    required: bool = False  # unless confirmed, it decides alone
    uncertain: bool = False  # inconclusive because a time is not known well enough
    if_uncertain: bool = False  # its text is for a verdict that such a time leaves open


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of VERDICTS, the reason with its numbers, and the checks behind it."""

    word: str
    why: str
    checks: tuple[Check, ...] = ()


def conclude(checks: Iterable[Check]) -> Verdict:
    """The verdict that follows from the checks.

    >>> conclude([said("it takes 3 ms."), holds("fast", False, refuted="That is slow.")]).why
    'it takes 3 ms. That is slow.'
    >>> conclude([require("measured", False, "not measured."), said("this is not reached.")]).why
    'not measured.'
    """
    seen: list[Check] = []
    word = CONFIRMED
    for check in checks:
        seen.append(check)
        if check.required and check.outcome != CONFIRMED:
            word = check.outcome
            break
        word = worst(word, check.outcome)
    uncertain = word == INCONCLUSIVE and any(check.uncertain for check in seen)
    texts = [check.text for check in seen if check.text and (uncertain or not check.if_uncertain)]
    return Verdict(word, " ".join(texts), tuple(check for check in seen if check.key))


def worst(*outcomes: str) -> str:
    """The outcome of all together: refuted before inconclusive before confirmed.

    >>> worst(CONFIRMED, INCONCLUSIVE), worst(INCONCLUSIVE, REFUTED, CONFIRMED), worst()
    ('inconclusive', 'refuted here', 'confirmed')
    """
    return next((word for word in (REFUTED, INCONCLUSIVE) if word in outcomes), CONFIRMED)


def outcome(answer: bool | None) -> str:
    """The word for yes, no, and not known."""
    return INCONCLUSIVE if answer is None else CONFIRMED if answer else REFUTED


def said(text: str) -> Check:
    """What was measured: a text that decides nothing."""
    return Check("", text=text)


def require(key: str, met: object, text: str, otherwise: str = INCONCLUSIVE) -> Check:
    """A condition without which there is nothing to judge. `text` says what is missing."""
    return Check(key, required=True) if met else Check(key, otherwise, text, required=True)


def holds(
    key: str, answer: bool | None, *, refuted: str = "", unknown: str = "", confirmed: str = "", **numbers: float
) -> Check:
    """A plain condition, with a text for each outcome and the numbers that decided it."""
    return Check(key, outcome(answer), {True: confirmed, False: refuted, None: unknown}[answer], numbers)


def each(key: str, answers: Mapping[str, bool | None], *, refuted: str = "", unknown: str = "") -> Check:
    """A condition that has to hold for every name; {} in a text stands for the names that it is about.

    >>> each("fast", {"a": True, "b": False, "c": False}, refuted="Slow: {}.").text
    'Slow: b, c.'
    """
    texts = []
    for answer, text in ((False, refuted), (None, unknown)):
        names = [name for name, given in answers.items() if given is answer]
        texts += [text.format(", ".join(names))] if names and text else []
    return Check(key, worst(*map(outcome, answers.values())), " ".join(texts))


def within(
    key: str,
    intervals: Mapping[str, Interval],
    least: float = 0.0,
    most: float = math.inf,
    *,
    hardly: float | None = None,
    refuted: str = "",
    unknown: str = "",
) -> Check:
    """Every value has to lie between the limits, as far as its interval can say. `hardly`: a value between it and `least`
    neither confirms nor refutes.

    >>> within("gain", {"a": Interval(3.0, 2.5, 3.5), "b": Interval(1.5, 1.4, 1.6)}, least=2, hardly=1.2).outcome
    'inconclusive'
    """
    answers = {name: interval.within(least, most) for name, interval in intervals.items()}
    uncertain = None in answers.values()
    if hardly is not None:
        clearly = {name: interval.within(hardly, most) for name, interval in intervals.items()}
        answers = {name: answer or (False if clearly[name] is False else None) for name, answer in answers.items()}
    found = each(key, answers, refuted=refuted, unknown=unknown)
    limits = {"least": least or None, "most": None if math.isinf(most) else most}
    numbers = {name: interval.middle for name, interval in intervals.items()}
    return msgspec.structs.replace(found, numbers=numbers, uncertain=uncertain, **limits)


def memory_bound(rows: Mapping[str, Moved], bandwidth: float | None) -> Check:
    """Every row's bytes have to take about the time that the memory needs for them; without a known bandwidth they do."""
    if bandwidth is None:
        return Check("memory bound")
    shares = {name: exact(row.moved_bytes / bandwidth * 1e9) / row.device for name, row in rows.items()}
    found = each(
        "memory bound",
        {n: None if one.high > MOST_OF_MEMORY else one.within(LEAST_OF_MEMORY) for n, one in shares.items()},
        refuted="At less than half of the specified bandwidth, memory is not the limit: {}.",
        unknown="Faster than the specified bandwidth, or not known exactly enough: {}.",
    )
    uncertain = any(one.high > MOST_OF_MEMORY >= one.middle for one in shares.values())
    numbers = {name: one.middle for name, one in shares.items()}
    return msgspec.structs.replace(
        found, numbers=numbers, uncertain=uncertain, least=LEAST_OF_MEMORY, most=MOST_OF_MEMORY
    )


def least_certain(rows: Mapping[str, Timed | Interval]) -> Check:
    """A text about the time that is known worst, for a verdict that such a time leaves open.

    >>> least_certain({"one": Interval(5e6, 5e6, 5e6, "5.00 ms"), "two": Interval(3e6, 2e6, 4e6, "3.00 ms, or so")}).text
    'Too uncertain to tell: two takes 3.00 ms, or so.'
    """
    times = {name: row.device if isinstance(row, Timed) else row for name, row in rows.items()}
    name = max(times, key=lambda name: times[name].width, default="")
    text = f"Too uncertain to tell: {name} takes {times[name].text}." if times else ""
    return Check("", text=text, if_uncertain=True)
