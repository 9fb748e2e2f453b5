"""Kernels are loaded or compiled inside the step: its first run, not a steady one.

Looks for: the GPU idle while the host compiles or autotunes, loads a kernel's code, or is in a launch that takes a millisecond
or more (the driver loads a kernel at its first launch).
Saving: that idle time. A warm step does not have it: the trace is of the wrong step, or shapes change from step to step.
Fix: run a few steps before the traced one; keep shapes the same, or compile with `dynamic=True`.
"""

from flopwise import units
from flopwise.advice.facts import Facts
from flopwise.advice.savings import Rule, idle_saved
from flopwise.analysis.idle import COMPILATION
from flopwise.records.finding import MEDIUM, Finding
from flopwise.records.waterfall import IDLE_COMPILATION, IDLE_OTHER

CODE = """schedule = torch.profiler.schedule(wait=1, warmup=3, active=3)      # traces steps that are warm
# a step that must be fast at once: run it before, with the shapes to come; CUDA_MODULE_LOADING=EAGER loads all kernels"""
RULE = Rule(__name__, (IDLE_COMPILATION, IDLE_OTHER), code=CODE)


def check(facts: Facts) -> Finding | None:
    e, idle = facts.explanation, facts.idle_ns(COMPILATION)
    if e is None or not idle or facts.details.compiled.compiling_ns:  # of the compiler graph_breaks speaks
        return None
    blamed = [one for one in e.blame if one.cause == COMPILATION]
    lines = [f"{units.duration(one.idle_ns)} in {' → '.join((*one.stack[-2:], one.what))}" for one in blamed[:4]]
    title = f"kernels are compiled or loaded inside the step: the GPU waits {units.duration(idle)}"
    saving = idle_saved(idle, f"the GPU is idle {units.duration(idle)} meanwhile; a warm step is not", MEDIUM)
    return RULE.finding(facts, title, saving, lines, evidence_ns=idle, idle_ns=idle)
