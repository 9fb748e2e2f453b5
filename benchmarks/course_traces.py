"""The course's five questions, asked of traces of our own: five sizes, four contexts, both profilers, on this machine's GPU.

    python benchmarks/course_traces.py OUT [--sizes small,medium,…] [--contexts 128,…] [--with kineto,nsys] [--phase train]

Each case is `flopwise profile` (untraced first, then traced) and `flopwise explain`. OUT gets one explanation per case as JSON,
and `answers.md` with the table; raw traces are deleted as soon as they are read, unless --keep is given: the largest have
hundreds of MB. A case that fails is a line that says why. What is there already is not done again.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

import flopwise
from flopwise.analysis.explanation import Explanation
from flopwise.render.explain_view import explanation_view, explanations_view
from flopwise.render.json import json_text
from flopwise.render.table import markdown

SIZES = "small,medium,large,xl,2.7B"
CONTEXTS = "128,256,512,1024"
LEVERS = {"attention": "naive", "norm": "eager", "activation": "eager", "optimizer": "foreach"}  # the course's own code


def traced(case: dict[str, Any], out: Path, given: argparse.Namespace) -> Explanation:
    """One case: profiled, explained, its explanation written down."""
    options = {
        **LEVERS,
        "batch": given.batch,
        "phase": given.phase,
        "precision": given.precision,
        "context": case["context"],
    }
    run = flopwise.profile(
        case["size"],
        profiler=case["profiler"],
        seconds=given.seconds,
        device=given.device,
        runs=out / "runs",
        **options,
    )
    point = run.points[0]
    if not point.trace_file:
        raise flopwise.FlopwiseError(f"{point.status}: {point.reason}", point.hint)
    explanation = flopwise.explain(run)
    explanation = msgspec.structs.replace(explanation, path=case["name"])
    (out / f"{case['name']}.json").write_text(json_text(explanation_view(explanation)[1]))
    if not given.keep:
        for trace in (run.path / "traces").iterdir():
            trace.unlink()
    return explanation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--contexts", default=CONTEXTS)
    parser.add_argument("--with", dest="profilers", default="kineto,nsys")
    parser.add_argument("--phase", default="train")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="the budget for timing the untraced step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--keep", action="store_true", help="keep the raw traces")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    cases = [
        {"name": f"{size}-t{context}-{given.phase}-{given.precision}-{profiler}", "size": size, "context": int(context),
         "profiler": profiler}
        for size in given.sizes.split(",")
        for context in given.contexts.split(",")
        for profiler in given.profilers.split(",")
    ]  # fmt: skip
    found, failed = [], []
    for n, case in enumerate(cases, 1):
        begun = time.monotonic()
        if (given.out / f"{case['name']}.json").exists():
            continue
        try:
            found.append(traced(case, given.out, given))
            said = found[-1].verdict
        except flopwise.FlopwiseError as error:
            said = f"failed: {error}"
            failed.append(f"- {case['name']}: {error}")
        print(f"[{n}/{len(cases)}] {case['name']} in {time.monotonic() - begun:.0f} s: {said}", file=sys.stderr)
        if found:
            tables = "\n".join(markdown(table) for table in explanations_view(found)[0])
            (given.out / "answers.md").write_text("\n".join([tables, *failed]) + "\n")


if __name__ == "__main__":
    main()
