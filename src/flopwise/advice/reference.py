"""The page on the findings, from the rules' docstrings: `python -m flopwise.advice.reference > docs/reference/findings.md`."""

import string
import sys
from typing import Any

from flopwise import units
from flopwise.advice import constants
from flopwise.advice.host_rules import ALL_HOST_RULES
from flopwise.advice.rank_rules import ALL_RANK_RULES
from flopwise.advice.rules import ALL_RULES

_HEADINGS = ("Looks for", "Saving", "Fix")
_OPENING = """# Findings

What `flopwise explain` and `flopwise tune` may report about a step: the rules in `src/flopwise/advice/rules/`, one file each;
those about a step on the CPU, after them, are in `src/flopwise/advice/host_rules/`, those about several ranks of a job, at the
end, in `src/flopwise/advice/rank_rules/`.
This page is generated from their docstrings and from `src/flopwise/advice/constants.py`.

A finding has a key (its rule), a title with its number, the numbers of the title as `values`, evidence, a predicted saving
with its arithmetic, the recipe's lever or the lines of PyTorch that fix it, and a confidence. It has two savings:

- **by itself**: what the step gets shorter if nothing else is changed. In a step that waits for launches, a faster kernel saves
  little: the GPU then waits longer.
- **saves**: what it adds to the sum once the findings above it are fixed. Each finding draws on parts of the waterfall, and
  what one has drawn, no other draws again; the sum is never more than the step.

Where the workload is known, the saving is the model's: the step is predicted with the lever changed, on the machine's
ceilings corrected by what was measured of the step as it is (host by phase, matmuls, attention, all other kernels). From a
trace alone it is the arithmetic given below. Savings under {LEAST_SAVING_SHARE:%} of the step are not reported, nor, except
in very short steps, those under {LEAST_SAVING_NS:duration}.
"""


def reference() -> str:
    """The page in Markdown."""
    all_rules = (*ALL_RULES, *ALL_HOST_RULES, *ALL_RANK_RULES)
    return "\n".join([_filled(_OPENING), *(_section(rule.__name__, rule.__doc__ or "") for rule in all_rules)])


class _Constants(string.Formatter):
    """Replaces '{NAME}' by the constant; '{NAME:%}', '{NAME:size}' and '{NAME:duration}' in its unit."""

    def format_field(self, value: Any, format_spec: str) -> str:
        in_unit = {"%": lambda x: units.percent(x, 0), "size": units.size, "duration": units.duration}
        return in_unit[format_spec](value) if format_spec in in_unit else super().format_field(value, format_spec)


def _filled(text: str) -> str:
    return _Constants().vformat(text, (), vars(constants))


def _section(module: str, text: str) -> str:
    title, _, rest = _filled(text).strip().partition("\n\n")
    lines = []
    for line in rest.splitlines():
        heading = next((word for word in _HEADINGS if line.startswith(f"{word}: ")), "")
        lines.append(f"- **{heading}**{line[len(heading) :]}" if heading else f"  {line}")
    return "\n".join([f"## `{module.rpartition('.')[2]}`", "", title, "", *lines, ""])


if __name__ == "__main__":
    sys.stdout.write(reference())
