"""The page on the findings, from the rules' own words: `python -m flopwise.advice.reference > docs/reference/findings.md`."""

import sys

from flopwise.advice.findings import LEAST_NS, LEAST_SHARE, RULES

_OPENING = f"""# Findings

What `flopwise explain` and `flopwise tune` may say of a step: the rules in `src/flopwise/advice/rules/`, one file each. This page
is written from their docstrings.

A finding has a title with its number, evidence, a predicted saving with its arithmetic, the recipe's lever or the lines of
PyTorch that mend it, and a confidence. Two savings are told:

- **by itself**: what the step gets shorter if nothing else is changed. In a step that waits for launches, a faster kernel saves
  little: the GPU then waits longer.
- **saves**: what it adds to the sum, the findings above it taken as mended. Each finding draws on parts of the waterfall, and
  what one has drawn, no other draws again; the sum is never more than the step.

Where the workload is known, the saving is the model's: the step is accounted for with the lever changed, on the machine's
ceilings corrected by what was measured of the step as it is (host by phase, matmuls, attention, all other kernels). Of a
trace alone it is the arithmetic told below. Savings under {LEAST_SHARE:.0%} of the step are not told, nor, but in very
short steps, those under {LEAST_NS / 1e6:g} ms.
"""


def reference() -> str:
    """The page in Markdown."""
    return "\n".join([_OPENING, *(_section(rule.__name__, rule.__doc__ or "") for rule in RULES)])


def _section(module: str, words: str) -> str:
    title, _, rest = words.strip().partition("\n\n")
    parts: list[str] = []
    for line in rest.splitlines():
        opens = next((word for word in ("Looks for", "Saving", "Mend") if line.startswith(f"{word}: ")), "")
        parts.append(f"- **{opens}**{line[len(opens) :]}" if opens else f"  {line}")
    return "\n".join([f"## `{module.rpartition('.')[2]}`", "", title, "", *parts, ""])


if __name__ == "__main__":
    sys.stdout.write(reference())
