"""What a step is bound by, in one word and in a sentence."""

from collections.abc import Mapping, Sequence

from flopwise import units
from flopwise.analysis import idle as causes
from flopwise.analysis.blame import OUTSIDE, HostBlame
from flopwise.analysis.idle import Idle

LAUNCH, HOST, DATA, TRANSFER, COMMUNICATION = "launch", "host", "data", "transfer", "communication"
SYNCHRONISATION, COMPILATION, ALLOCATOR = "synchronisation", "compilation", "allocator"
GPU, IDLE, CAPTURE = "gpu", "idle", "capture"  # busy; idle for several reasons; it records a CUDA graph
BOUND = 0.2  # of the step spent on one thing: it is bound by that
SMALLEST, _MOST_CAUSES = 0.01, 2  # of the step: causes of idle time below are not named; how many are
_BECAUSE = {
    causes.LATE_LAUNCH: "because the host launches late",
    causes.SYNCHRONISATION: "after the host has waited",
    causes.INPUT: "while the host waits for data",
    causes.TRANSFER: "while the host copies out of pageable memory",
    causes.HOST: "while the host runs other code",
    causes.COMPILATION: "while the host compiles or loads kernels",
    causes.ALLOCATOR: "while the host asks the driver for memory",
    causes.BETWEEN: "between queued kernels",
    causes.NOTHING: "with nothing left to do",
    causes.UNKNOWN: "for reasons that the trace does not show",
}
_BY_CAUSE = {
    causes.LATE_LAUNCH: LAUNCH,
    causes.HOST: HOST,
    causes.INPUT: DATA,
    causes.SYNCHRONISATION: SYNCHRONISATION,
    causes.COMPILATION: COMPILATION,
    causes.ALLOCATOR: ALLOCATOR,
}
_WORDS = {
    LAUNCH: "launch-bound",
    HOST: "host-bound",
    DATA: "data-bound",
    TRANSFER: "transfer-bound",
    COMMUNICATION: "communication-bound",
    SYNCHRONISATION: "bound by synchronisation",
    COMPILATION: "bound by compilation",
    ALLOCATOR: "bound by memory allocation",
}


CAPTURED = (
    "a CUDA graph is captured here: its kernels are recorded and do not run, so that nothing is said of their time"
)


def in_two_words(bound: str) -> str:
    """The verdict.

    >>> in_two_words(LAUNCH), in_two_words(GPU)
    ('launch-bound', 'GPU-bound')
    """
    return _WORDS.get(bound) or {GPU: "GPU-bound", CAPTURE: "graph capture"}.get(bound, "GPU idle")


def verdict(
    idle: Idle,
    window_ns: float,
    busy: Mapping[str, float],
    blamed: Sequence[HostBlame] = (),
    *,
    launch_bound: bool | None = None,
) -> tuple[str, str]:
    """What the window is bound by, and why, in words; idle time with its causes, the largest first.

    `busy`: nanoseconds in which only TRANSFER or COMMUNICATION ran. `launch_bound`: whether late launches may be it.
    """
    share = {cause: ns / window_ns for cause, ns in idle.by_cause_ns.items()}
    shares = {_BY_CAUSE[cause]: one for cause, one in share.items() if cause in _BY_CAUSE}
    shares[TRANSFER] = share.get(causes.TRANSFER, 0.0) + busy.get(TRANSFER, 0.0) / window_ns
    shares[COMMUNICATION] = busy.get(COMMUNICATION, 0.0) / window_ns
    bound = max(shares, key=lambda one: shares[one])
    idle_share = idle.total_ns / window_ns
    words = _idle_words(share, idle_share, blamed)
    waits = bound not in (TRANSFER, COMMUNICATION)
    larger = waits and shares[bound] < max(share.values())  # an idle time that nobody can be named for
    if shares[bound] < BOUND or larger or (bound == LAUNCH and launch_bound is False):
        if idle_share < BOUND:
            return GPU, f"GPU-bound: the GPU is busy {units.percent(1 - idle_share, 0)} of the step"
        return IDLE, words
    if waits:
        return bound, f"{_WORDS[bound]}: {words}"
    what = "copies between host and GPU" if bound == TRANSFER else "communication"
    only = f"{_WORDS[bound]}: {units.percent(shares[bound], 0)} of the step is {what} and nothing else"
    return bound, f"{only}; {words}" if idle_share >= SMALLEST else only


def _idle_words(share: Mapping[str, float], whole: float, blamed: Sequence[HostBlame]) -> str:
    ranked = sorted(share, key=lambda cause: -share[cause])[:_MOST_CAUSES]
    named = [cause for cause in ranked if cause == ranked[0] or share[cause] >= SMALLEST]
    who = [_who(cause, blamed) if cause == ranked[0] else "" for cause in named]
    parts = [f"{units.percent(share[cause], 0)} {_BECAUSE[cause]}{one}" for cause, one in zip(named, who, strict=True)]
    return f"the GPU is idle {units.percent(whole, 0)} of the step: {', '.join(parts)}"


def _who(cause: str, blamed: Sequence[HostBlame]) -> str:
    """Whom most of the idle time of a cause goes to, where that is known."""
    mine = [one for one in blamed if one.cause == cause]
    known = [one for one in mine if one.what != OUTSIDE]
    return f" ({known[0].what})" if known and 2 * known[0].idle_ns >= sum(one.idle_ns for one in mine) else ""
