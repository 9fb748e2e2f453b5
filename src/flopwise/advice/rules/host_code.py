"""The GPU waits for code on the host that launches nothing: pre-processing, decoding, logging.

Looks for: the GPU idle for {HOST_CODE_SHARE:%} of the step or more while the host runs a function, range or op that launches no
work; up to {MOST_HOST_CODE} of them. Names are known where the trace has stacks, ranges or ops.
Saving: that idle time, if the code runs ahead of the step or beside it.
Fix: run it in the data loader's workers, or in a thread, one step ahead; or leave it out of the step.
"""

import re
from collections.abc import Sequence

import msgspec

from flopwise import units
from flopwise.advice.constants import HOST_CODE_SHARE, MOST_HOST_CODE
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, idle_saved
from flopwise.analysis.blame import OUTSIDE, HostBlame
from flopwise.analysis.idle import HOST
from flopwise.records.finding import LOW, MEDIUM, Finding
from flopwise.records.waterfall import IDLE_HOST, IDLE_OTHER

CODE = """ahead = executor.submit(prepare, next_item)      # a thread or a process; while the GPU computes this one
batch = ahead.result()                           # at the start of the next step
# or in the data loader's workers: DataLoader(items, num_workers=8, collate_fn=prepare, pin_memory=True)"""
RULE = Rule(__name__, (IDLE_HOST, IDLE_OTHER), code=CODE)
_FUNCTION = re.compile(r"^(?:.*/)?([^/]+\.py)\((\d+)\): (.+)$")
_PREPARES = re.compile(
    r"(?i)pre_?proc|process|prepare|load|read|fetch|decod|tokeni[sz]|transform|augment|collate|batch|resize|sample|feature"
)
_STACK = 4  # of the functions around it, in a line of evidence


def check(facts: Facts) -> tuple[Finding, ...]:
    """The longest of them."""
    e, step = facts.explanation, facts.step_ns
    by_what: dict[str, list[HostBlame]] = {}
    for one in e.blame if e is not None else ():
        if one.cause == HOST:
            by_what.setdefault(one.what, []).append(one)
    worth = {what: some for what, some in by_what.items() if facts.blamed_ns(*some) >= HOST_CODE_SHARE * step}
    ranked = sorted(worth, key=lambda what: -facts.blamed_ns(*worth[what]))
    return tuple(_finding(facts, what, worth[what]) for what in ranked[:MOST_HOST_CODE])


def _finding(facts: Facts, what: str, some: Sequence[HostBlame]) -> Finding:
    idle, traced = facts.blamed_ns(*some), sum(one.idle_ns for one in some)
    first = some[0]
    code = f"Python before {first.before}" if what == OUTSIDE and first.before else _short(what)
    title = f"the GPU waits for {code}: {units.duration(idle)}"
    saving = idle_saved(
        idle,
        f"the GPU is idle {units.duration(idle)} while the host runs it ({units.duration(traced)} traced)",
        LOW if what == OUTSIDE else MEDIUM,
    )
    lines = [f"{units.duration(ns)} of it in {name}" for name, ns in first.inner.items()]
    if first.stack:
        lines.append(f"called by {' → '.join(first.stack[-_STACK:])}")
    if what == OUTSIDE:
        lines.append("which function it is: profile with stacks (with_stack=True, or --stacks)")
    else:
        lines.append(f"it is {what}")
    rule = RULE if _PREPARES.search(what) else msgspec.structs.replace(RULE, code="")
    return rule.finding(facts, title, saving, lines, evidence_ns=idle, idle_ns=idle, traced_ns=traced)


def _short(what: str) -> str:
    """A function with its file, a range without its frame.

    >>> _short("transformers/pipelines/base.py(1306): __call__"), _short("## data_load ##")
    ('__call__ (base.py:1306)', 'data_load')
    """
    match = _FUNCTION.match(what)
    return f"{match[3]} ({match[1]}:{match[2]})" if match else what.strip("# ")
