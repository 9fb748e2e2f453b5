"""The host is the next limit: without a change to its launches, a faster GPU would wait for it.

Looks for: a step not captured in a graph whose host is busy for longer than the step would take with all other changes made.
Saving: of its own only the idle time by late launches. What the others save is saved with this change alone, so it is listed
before them; but after the largest, if the host leaves that room to save more by itself: with what the host held up of it.
Fix: capture the step in a CUDA graph, or compile it with `mode="reduce-overhead"`.
"""

import msgspec

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.advice.rules import launch_bound
from flopwise.advice.savings import Rule, idle_saved, predicted_or
from flopwise.analysis.idle import LATE_LAUNCH
from flopwise.records.finding import MEDIUM, Finding

RULE = Rule(__name__, launch_bound.RULE.parts, launch_bound.RULE.levers, launch_bound.CODE)


def check(facts: Facts) -> Finding | None:
    """Whether the other changes leave less than the host needs, is asked when they are ranked."""
    host, late = facts.host_ns, facts.idle_ns(LATE_LAUNCH)
    if host is None or facts.replays or (facts.recipe is not None and facts.recipe.graph == "on"):
        return None
    arithmetic = f"idle by late launches {units.duration(late)} of {units.duration(facts.step_ns)}"
    saving = predicted_or(facts, RULE.levers, idle_saved(late, arithmetic, MEDIUM))
    title = f"the CPU needs {units.duration(host)} to launch a step: a faster GPU would wait for it"
    rule = RULE if facts.trains else msgspec.structs.replace(RULE, code=launch_bound.CODE_INFERENCE)
    return rule.finding(facts, title, saving, launch_bound.evidence(facts), evidence_ns=late, host_ns=host)
